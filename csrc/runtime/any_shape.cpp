#include "runtime/any_shape.h"

#include <cctype>
#include <cstdint>
#include <memory>
#include <unordered_set>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "runtime/checks.h"
#include "runtime/numerics.h"
#include "runtime/nested_evaluation.h"

namespace mittens {

namespace {

thread_local int expansions = 0;

// The name of an op's primitive: MittensRmsNorm of rms_norm.
std::string primitive_name(const char* op) {
  std::string name = "Mittens";
  bool begins = true;
  for (const char* letter = op; *letter; ++letter) {
    if (*letter != '_') {
      name += begins ? static_cast<char>(std::toupper(static_cast<unsigned char>(*letter))) : *letter;
    }
    begins = *letter == '_';
  }
  return name;
}

Arrays stand_ins(const Arrays& arrays) {
  Arrays all;
  for (const mx::array& array : arrays) {
    all.push_back(stand_in_for(array));
  }
  return all;
}

// The inputs, with others in the place of some, which are given by their numbers.
Arrays with_others(Arrays inputs, const std::vector<int>& numbers, const Arrays& others) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    inputs[numbers[i]] = others[i];
  }
  return inputs;
}

Arrays some_of(const Arrays& inputs, const std::vector<int>& numbers) {
  Arrays some;
  for (int number : numbers) {
    some.push_back(inputs[number]);
  }
  return some;
}

Arrays joined(Arrays first, const Arrays& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// A function's first `count` inputs, and the others.
std::pair<Arrays, Arrays> parted(const Arrays& inputs, size_t count) {
  const auto middle = inputs.begin() + static_cast<std::ptrdiff_t>(count);
  return {Arrays(inputs.begin(), middle), Arrays(middle, inputs.end())};
}

// The same function, as MLX derives it right: it puts copies of arrays that have no operation on the default stream,
// and takes the cotangent of the first alone of results that are one array.
ArrayFunction derivable(ArrayFunction function, mx::Stream stream) {
  return [function = std::move(function), stream](const Arrays& inputs) {
    std::unordered_set<std::uintptr_t> known;
    for (const mx::array& input : inputs) {
      known.insert(input.id());
    }
    Arrays results = function(inputs);
    for (mx::array& result : results) {
      if (!known.insert(result.id()).second) {
        result = mx::copy(result, stream);
      }
    }
    return results;
  };
}

Arrays copies(const Arrays& arrays, mx::Stream stream) {
  Arrays all;
  for (const mx::array& array : arrays) {
    all.push_back(mx::copy(array, stream));
  }
  return all;
}

class AnyShape : public mx::Primitive {
 public:
  // like: a function whose results have the shapes and dtypes of the function's.
  AnyShape(mx::Stream stream, const char* op, ArrayFunction function, ArrayFunction like)
      : mx::Primitive(stream),
        op_(op),
        name_(primitive_name(op)),
        function_(std::move(function)),
        like_(std::move(like)) {}

  // The results of this primitive.
  static Arrays apply(std::shared_ptr<AnyShape> primitive, const Arrays& inputs) {
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const mx::array& result : primitive->like(inputs)) {
      shapes.push_back(result.shape());
      dtypes.push_back(result.dtype());
    }
    if (shapes.size() == 1) {
      return {mx::array(std::move(shapes[0]), dtypes[0], std::move(primitive), inputs)};
    }
    return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
  }

  const char* name() const override {
    return name_.c_str();
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const mx::array& result : like(inputs)) {
      shapes.push_back(result.shape());
    }
    return shapes;
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs);
  }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs);
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    const ArrayFunction function = [function = function_, argnums, count = primals.size(),
                                    stream = stream()](const Arrays& inputs) {
      const auto [primals, cotangents] = parted(copies(inputs, stream), count);
      return mx::vjp(of_some(function, primals, argnums, stream), some_of(primals, argnums), cotangents).second;
    };
    const ArrayFunction like = [argnums](const Arrays& inputs) { return some_of(inputs, argnums); };
    return derived(function, like, joined(primals, cotangents));
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    // Integers have no tangents, though mx passes some where they were computed from numbers that have.
    std::vector<int> numbers;
    Arrays of_numbers;
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (mx::issubdtype(primals[argnums[i]].dtype(), mx::inexact)) {
        numbers.push_back(argnums[i]);
        of_numbers.push_back(tangents[i]);
      }
    }
    const ArrayFunction function = [function = function_, numbers, count = primals.size(),
                                    stream = stream()](const Arrays& inputs) {
      const auto [primals, tangents] = parted(copies(inputs, stream), count);
      return mx::jvp(of_some(function, primals, numbers, stream), some_of(primals, numbers), tangents).second;
    };
    const ArrayFunction like = [like = like_, count = primals.size()](const Arrays& inputs) {
      return like(parted(inputs, count).first);
    };
    return derived(function, like, joined(primals, of_numbers));
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const auto batched = [&](const ArrayFunction& function) -> ArrayFunction {
      return [function, axes](const Arrays& inputs) { return mx::vmap(function, axes)(inputs); };
    };
    Arrays outputs = derived(batched(function_), batched(like_), inputs);
    std::vector<int> output_axes(outputs.size(), 0);
    return {std::move(outputs), std::move(output_axes)};
  }

 private:
  static ArrayFunction of_some(const ArrayFunction& function, const Arrays& inputs, const std::vector<int>& numbers,
                               mx::Stream stream) {
    return derivable(
        [function, inputs, numbers](const Arrays& some) { return function(with_others(inputs, numbers, some)); },
        stream);
  }

  Arrays derived(ArrayFunction function, ArrayFunction like, const Arrays& inputs) {
    return apply(std::make_shared<AnyShape>(stream(), op_, std::move(function), std::move(like)), inputs);
  }

  Arrays like(const Arrays& inputs) const {
    const AskingForShapes asking;
    return like_(stand_ins(inputs));
  }

  void eval(const Arrays& inputs, Arrays& outputs) {
    const Expanding expanding;
    const WithNumerics with(numerics_);
    evaluate_inside(name(), "the op", function_(inputs), outputs, stream());
  }

  const char* op_;
  std::string name_;
  ArrayFunction function_;
  ArrayFunction like_;
  Numerics numerics_ = numerics();
};

}  // namespace

// MLX does not say whether it traces, nor how: an array that is marked as a tracer is one while it does, and the number
// of an array's elements is an operation, and no constant, where it does so for all shapes.
bool traces_any_shape() {
  static const mx::array& probe = [] -> const mx::array& {
    auto* array = new mx::array(0);  // MLX may be gone before static objects are
    array->set_tracer(true);
    return *array;
  }();
  return probe.is_tracer() && expansions == 0 && mx::number_of_elements(probe, {}, false).has_primitive();
}

Expanding::Expanding() {
  ++expansions;
}

Expanding::~Expanding() {
  --expansions;
}

Arrays apply_for_any_shape(const char* op, ArrayFunction function, const Arrays& inputs, mx::Stream stream) {
  return AnyShape::apply(std::make_shared<AnyShape>(stream, op, function, function), inputs);
}

}  // namespace mittens
