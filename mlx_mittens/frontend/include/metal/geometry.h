// Geometry: functions of vectors as a whole. math.h includes it behind the functions of their elements.
#pragma once

namespace metal {

template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE mittens::Element<V> dot(V x, V y) {
  mittens::Element<V> sum = x[0] * y[0];
  for (int i = 1; i < mittens::Vector<V>::size; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE mittens::Element<V> length_squared(V x) {
  return dot(x, x);
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE mittens::Element<V> length(V x) {
  return sqrt(dot(x, x));
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE mittens::Element<V> distance(V x, V y) {
  return length(x - y);
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE V normalize(V x) {
  return x * rsqrt(dot(x, x));
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE mittens::Element<V> distance_squared(V x, V y) {
  return length_squared(x - y);
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE V faceforward(V normal, V incident, V reference) {
  return dot(incident, reference) < mittens::Element<V>(0) ? normal : -normal;
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE V reflect(V incident, V normal) {
  return incident - normal * (mittens::Element<V>(2) * dot(normal, incident));
}
template <typename V, typename = mittens::FloatVector<V>>
MITTENS_INLINE V refract(V incident, V normal, mittens::Element<V> ratio) {
  using E = mittens::Element<V>;
  const E cosine = dot(normal, incident);
  const E rest = E(1) - ratio * ratio * (E(1) - cosine * cosine);
  return rest < E(0) ? V(E(0)) : incident * ratio - normal * (ratio * cosine + sqrt(rest));
}
template <typename T, typename = enable_if_t<mittens::has_math<T>>>
MITTENS_INLINE vec<T, 3> cross(vec<T, 3> x, vec<T, 3> y) {
  return x.yzx * y.zxy - x.zxy * y.yzx;
}

MITTENS_OBJECTS(length_squared)
MITTENS_OBJECTS(dot)
MITTENS_OBJECTS(length)
MITTENS_OBJECTS(distance)
MITTENS_OBJECTS(normalize)
MITTENS_OBJECTS(distance_squared)
MITTENS_OBJECTS(faceforward)
MITTENS_OBJECTS(reflect)
MITTENS_OBJECTS(cross)
template <typename A, typename B, typename M = mittens::object_t<A, B>>
MITTENS_INLINE M refract(A incident, B normal, mittens::Element<M> ratio) {
  return refract(mittens::construct<M>(incident), mittens::construct<M>(normal), ratio);
}

}  // namespace metal
