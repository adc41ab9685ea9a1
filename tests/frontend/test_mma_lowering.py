"""Products of matrices in PTX: which become one instruction of the tensor cores, and that it computes the same."""

import re

import numpy as np
import pytest
from helpers import tolerances

from mlx_mittens import frontend
from mlx_mittens.frontend import ptxas
from mlx_mittens.frontend.lower.mma_lowering import joined_products

needs_ptxas = pytest.mark.skipif(ptxas.find() is None, reason="no ptxas: pip install nvidia-cuda-nvcc")

LANES = np.arange(32)


# Semantics of the instructions. A register is 32 lanes of 32 bits. They are taken as integers, and in a matrix's
# registers each half as one: so nothing is rounded, and another order of computing gives the same results.


def _elements(register, dtype):
    """The two elements of each lane, which differ between types as they do in truth."""
    halves = np.stack([register & 0xFFFF, register >> 16], axis=1)
    return halves * np.uint32({"f16": 3, "bf16": 5}[dtype]) + np.uint32(1)


def _rows(register, dtype):
    """A left matrix: lane l has row l / 4, columns 2 * (l % 4), + 1."""
    return _elements(register, dtype).reshape(8, 8)


def _product(dtype, results, left, right, sums):
    """The values of `results`: for each 8 rows of left matrices a pair; `left` by depth, by rows."""
    values = []
    for row in range(len(results) // 2):
        total = np.stack(sums[2 * row : 2 * row + 2], axis=1).reshape(8, 8)
        for step, b in zip(left, right, strict=True):
            # A right matrix lies transposed.
            total = total + _rows(step[row], dtype) @ _rows(b, dtype).T
        values += [total.reshape(32, 2)[:, 0], total.reshape(32, 2)[:, 1]]
    return dict(zip(results, values, strict=True))


class Machine:
    """Runs the few instructions of these tests, and keeps the stored values."""

    def __init__(self, registers):
        self.registers = dict(registers)
        self.stored = []

    def run(self, text):
        lines = text.splitlines()
        number = 0
        while number < len(lines):
            line = lines[number].split("//")[0].strip()
            number += 1
            branch = re.fullmatch(r"@(%\w+) bra (\S+);", line)
            if branch:
                number = lines.index(f"{branch[2]}:") if self.registers[branch[1]][0] % 2 else number
            elif line.startswith("{ "):
                own = re.search(r"\.reg \.b32 (.*?);", line)
                names = own[1].split(", ")
                assert not set(names) & set(self.registers)
                for statement in line[2:-2].replace(own[0], "").split("; "):
                    self._step(statement.strip().rstrip(";"))
                for name in names:
                    self.registers.pop(name, None)
            elif line and not line.endswith(":"):
                self._step(line.rstrip(";"))
        return self.stored

    def _step(self, statement):
        if not statement:
            return
        opcode, operands = statement.split(None, 1)
        groups = [
            [self._parsed(name) for name in (braced or plain).split(", ")]
            for braced, plain in re.findall(r"\{([^}]*)\}|([^\s,{}][^,{}]*)", operands)
        ]
        value = lambda name: self.registers[name] if isinstance(name, str) else np.full(32, name % 2**32, np.uint32)
        read = [[value(name) for name in group] if group is not groups[0] else [] for group in groups]
        results = groups[0]
        if opcode.startswith("mittens.multiply."):
            written = _product(opcode.split(".")[-1], results, [read[1]], read[2], read[3])
        elif opcode.startswith("mma."):
            found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(\w+)\.(\w+)\.f32", opcode)
            depth, dtype = int(found[1]) // 8, found[2]
            assert found[3] == dtype
            assert [len(group) for group in groups] == [4, 2 * depth, depth, 4]
            left = [read[1][2 * step : 2 * step + 2] for step in range(depth)]
            written = _product(dtype, results, left, read[2], read[3])
        elif opcode == "st.global.b32":
            self.stored.append(read[1][0])
            written = {}
        elif opcode == "add.s32":
            written = {results[0]: read[1][0] + read[2][0]}
        elif opcode == "shfl.sync.bfly.b32":
            written = {results[0]: read[1][0][LANES ^ 9]}
        elif opcode == "mov.b32" and len(results) == 2:
            written = dict(zip(results, [read[1][0] & 0xFFFF, read[1][0] >> 16], strict=True))
        elif opcode == "mov.b32" and len(read[1]) == 2:
            written = {results[0]: (read[1][0] & 0xFFFF) | read[1][1] << 16}
        else:
            assert opcode == "mov.b32"
            written = {results[0]: read[1][0]}
        self.registers.update(written)

    @staticmethod
    def _parsed(name):
        return name if name.startswith(("%", "[")) else int(name)


# Written by hand. Each line is an instruction.


def product(results, left, right, sums, dtype="f16"):
    """As clang writes it."""
    return f"\tmittens.multiply.{dtype} {{{results}}}, {{{left}}}, {{{right}}}, {{{sums}}};"


def joined(*lines):
    return joined_products("\n".join(lines) + "\n").splitlines()


def alone(*lines):
    """Each product by itself, all lines where they were."""
    return [done for line in lines for done in joined(line)]


def same(*lines):
    """Joined, and computing the same: all registers of the lines are stored in the end, but for %t0, %t1 and so on."""
    names = sorted(set(re.findall(r"%\w+", "\n".join(lines))))
    ends = [f"\tst.global.b32 [%out], {name};" for name in names if not name.startswith("%t")]
    rng = np.random.default_rng(0)
    start = {name: rng.integers(0, 2**32, 32, dtype=np.uint32) for name in names}
    done = joined(*lines, *ends)
    np.testing.assert_array_equal(Machine(start).run("\n".join(done)), Machine(start).run("\n".join([*lines, *ends])))
    return done[: -len(ends)]


X = product("%x0, %x1", "%a", "%b", "%c0, %c1")
LONE = "\t{ .reg .b32 %mittens_zero, %mittens_unread; mov.b32 %mittens_zero, 0; "


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_lone(dtype):
    lines = ["\tmov.b32 \t%a, %e;", product("%x0, %x1", "%a", "%b", "%c0, %c1", dtype), "\tret;"]
    assert joined(*lines) == [
        lines[0],
        f"{LONE}mma.sync.aligned.m16n8k8.row.col.f32.{dtype}.{dtype}.f32 "
        "{%x0, %x1, %mittens_unread, %mittens_unread}, {%a, %mittens_zero}, {%b}, "
        "{%c0, %c1, %mittens_zero, %mittens_zero}; }",
        lines[2],
    ]
    same(*lines[:2])


def test_inline_asm_is_not_marked():
    assert joined("\t// begin inline asm", X, "\t// end inline asm", "\tret;") == [*alone(X), "\tret;"]
    assert joined_products(f"{X}\n") == f"{alone(X)[0]}\n"


def test_text_without_products():
    for text in ("", "\t// begin inline asm\n\tmov.b32 %r1, %r2;\n\t// end inline asm\n\n\tret;"):
        assert joined_products(text) == text


PAIR = [X, product("%y0, %y1", "%d", "%b", "%e0, %e1")]


def test_two_that_share_the_right_matrix():
    assert same(*PAIR) == [
        "\tmma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%x0, %x1, %y0, %y1}, {%a, %d}, {%b}, {%c0, %c1, %e0, %e1};"
    ]
    # Sums in place; and a register that the second overwrites for the first to read.
    assert len(same(product("%x0, %x1", "%a", "%b", "%x0, %x1"), product("%y0, %y1", "%d", "%b", "%y0, %y1"))) == 1
    assert len(same(X, product("%c0, %c1", "%d", "%b", "%y0, %y1"))) == 1


def test_three_that_share_the_right_matrix():
    done = same(*PAIR, product("%z0, %z1", "%a", "%b", "%e0, %e1"))
    assert len(done) == 2 and done[1].startswith(LONE)


SUM = [product("%t0, %t1", "%a", "%b", "%c0, %c1"), product("%x0, %x1", "%d", "%e", "%t0, %t1")]
IN_PLACE = [product("%x0, %x1", "%a", "%b", "%x0, %x1"), product("%x0, %x1", "%d", "%e", "%x0, %x1")]


def test_sum():
    assert same(*SUM) == [
        f"{LONE}mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%x0, %x1, %mittens_unread, %mittens_unread}}, "
        "{%a, %mittens_zero, %d, %mittens_zero}, {%b, %e}, {%c0, %c1, %mittens_zero, %mittens_zero}; }"
    ]
    assert len(same(*IN_PLACE)) == 1


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_chain_of_sums(count):
    """Always two of them; an odd one is left over."""
    pairs = ["%c0, %c1", *(f"%t{2 * i}, %t{2 * i + 1}" for i in range(count - 1)), "%x0, %x1"]
    done = same(*(product(pairs[i + 1], f"%a{i}", f"%b{i}", pairs[i]) for i in range(count)))
    assert [re.search(r"m16n8k\d+", line)[0] for line in done] == ["m16n8k16"] * (count // 2) + ["m16n8k8"] * (
        count % 2
    )


def test_pairs_and_sums():
    lines = [
        product("%t0, %t1", "%a0", "%b0", "%c0, %c1"),
        product("%t2, %t3", "%a1", "%b0", "%c2, %c3"),
        "\tmov.b32 \t{%h0, %h1}, %a1;",
        product("%x0, %x1", "%a2", "%b1", "%t0, %t1"),
        product("%y0, %y1", "%a3", "%b1", "%t2, %t3"),
    ]
    assert same(*lines) == [
        lines[2],
        "\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%x0, %x1, %y0, %y1}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, "
        "{%c0, %c1, %c2, %c3};",
    ]


BETWEEN_IS_FREE = {
    "nothing": "",
    "a comment": "\t// %a of %x0",
    "a commented instruction": "\tmov.b32 \t%h0, %a; // not %a, %x0",
    "operands read": "\tadd.s32 \t%h0, %a, %c0;",
    "operands unpacked": "\tmov.b32 \t{%h0, %h1}, %a;",
    "operands packed": "\tmov.b32 \t%h0, {%b, %c0};",
    "an operand stored": "\tst.global.b32 [%out], %c1;",
    "what the second reads is written": "\tshfl.sync.bfly.b32 \t%d, %h0, 9, 31, -1;",
    "a product of another kind": product("%h0, %h1", "%a", "%b", "%c0, %c1", "bf16"),
}


@pytest.mark.parametrize("between", BETWEEN_IS_FREE.values(), ids=BETWEEN_IS_FREE)
@pytest.mark.parametrize("first, second", [PAIR, SUM], ids=["pair", "sum"])
def test_joined_over(first, second, between):
    done = same(first, between, second)
    assert sum("mma." in line for line in done) == 1 + ("mittens" in between)
    assert done[0] == (alone(between)[0] if between else "")


READ_BETWEEN = {
    "read": "\tadd.s32 \t%h0, %h1, RESULT;",
    "stored": "\tst.global.b32 [%out], RESULT;",
    "packed": "\tmov.b32 \t%h0, {%h1, RESULT};",
    "the address of a store": "\tst.global.b32 [RESULT], %h0;",
    "overwritten": "\tmov.b32 \tRESULT, %h0;",
    "a sum": product("%h0, %h1", "%g", "%f", "%h2, RESULT"),
    "a left matrix": product("%h0, %h1", "RESULT", "%f", "%h2, %h3"),
    "a right matrix": product("%h0, %h1", "%g", "RESULT", "%h2, %h3"),
}


@pytest.mark.parametrize("between", READ_BETWEEN.values(), ids=READ_BETWEEN)
@pytest.mark.parametrize("first, second", [PAIR, IN_PLACE], ids=["pair", "sum"])
@pytest.mark.parametrize("result", ["%x0", "%x1"])
def test_result_between(first, second, between, result):
    lines = [first, between.replace("RESULT", result), second]
    assert joined(*lines) == alone(*lines)


WRITTEN_BETWEEN = {
    "mov": "\tmov.b32 \tOPERAND, %h0;",
    "in itself": "\tadd.s32 \tOPERAND, OPERAND, %h0;",
    "unpacked": "\tmov.b32 \t{%h0, OPERAND}, %h1;",
    "loaded": "\tld.global.v4.b32 \t{%h0, %h1, OPERAND, %h2}, [%rd1+16];",
    "shuffled": "\tshfl.sync.idx.b32 \tOPERAND|%p1, %h0, %h1, 31, -1;",
    "turned": "\tmovmatrix.sync.aligned.m8n8.trans.b16 OPERAND, %h0;",
    "a product": product("%h0, OPERAND", "%h1", "%h2", "%h3, %h4"),
    "predicated": "\t@%p1 mov.b32 \tOPERAND, %h0;",
    "two in a line": "\tmov.b32 \t%h1, %h0; mov.b32 \tOPERAND, %h0;",
}


@pytest.mark.parametrize("between", WRITTEN_BETWEEN.values(), ids=WRITTEN_BETWEEN)
@pytest.mark.parametrize("first, second", [PAIR, SUM], ids=["pair", "sum"])
@pytest.mark.parametrize("operand", ["%a", "%b", "%c0", "%c1"])
def test_operand_written_between(first, second, between, operand):
    lines = [first, between.replace("OPERAND", operand), second]
    assert joined(*lines) == alone(*lines)


ENDS_BLOCK = [
    "$L__BB0_2:",
    "$L__BB0_2:                              // =>This Inner Loop Header: Depth=1",
    "loop:",
    "loop: mov.b32 \t%h0, %h1;",
    "\tbra.uni \t$L__BB0_2;",
    "\tbra \t$L__BB0_2;",
    "\t@%p1 bra \t$L__BB0_2;",
    "\t@!%p1 bra.uni \t$L__BB0_2;",
    "\t@%p1  bra $L__BB0_2;",
    "\tbrx.idx \t%r1, $L_brx_0;",
    "\tret;",
    "\t@%p1 ret;",
    "\texit;",
    "\t@%p1 exit;",
    "\ttrap;",
    "\tbar.sync \t0;",
    "\tbar.warp.sync \t-1;",
    "\tbarrier.sync \t0;",
    "\tcall.uni (%h0), other, (%h1);",
    "\tcall.uni ",
    "\tother, ",
    "\t{ // callseq 0, 0",
    "\t{",
    "\t} // callseq 0",
    "}",
    "\t@%p1 st.global.b32 \t[%rd1], %h0;",
    "\tmov.b32 \t%h0,",
    '\t.pragma "nounroll";',
    "\t.reg .b32 \t%h0;",
    "\t.loc \t1 20 3",
]


@pytest.mark.parametrize("between", ENDS_BLOCK)
@pytest.mark.parametrize("first, second", [PAIR, SUM], ids=["pair", "sum"])
def test_blocks_end(first, second, between):
    lines = [first, between, second]
    assert joined(*lines) == alone(*lines)


NOT_JOINED = {
    "another type, same right matrix": [X, product("%y0, %y1", "%d", "%b", "%e0, %e1", "bf16")],
    "another type, a sum": [X, product("%x0, %x1", "%d", "%e", "%x0, %x1", "bf16")],
    "nothing in common": [X, product("%y0, %y1", "%d", "%e", "%f0, %f1")],
    "the same left matrix": [X, product("%y0, %y1", "%a", "%e", "%f0, %f1")],
    "the first's result is a left matrix": [X, product("%y0, %y1", "%x0", "%b", "%e0, %e1")],
    "the first's result is the right matrix": [
        product("%x0, %b", "%a", "%b", "%c0, %c1"),
        product("%y0, %y1", "%d", "%b", "%e0, %e1"),
    ],
    "the first's result is half a sum": [X, product("%y0, %y1", "%d", "%b", "%e0, %x1")],
    "the same result": [X, product("%y0, %x1", "%d", "%b", "%e0, %e1")],
    "sum of the same right matrix": [X, product("%x0, %x1", "%x0", "%b", "%x0, %x1")],
    "a sum that is also a left matrix": [X, product("%x0, %x1", "%x1", "%e", "%x0, %x1")],
    "a sum that is also a right matrix": [X, product("%x0, %x1", "%d", "%x0", "%x0, %x1")],
    "a turned sum": [X, product("%x0, %x1", "%d", "%e", "%x1, %x0")],
    "half of it used later": [*SUM, "\tmov.b32 \t%h0, %t1;"],
    "half of it used in another block": [*SUM, "$L1:", "\tst.global.b32 [%out], %t0;"],
    "half of it used above, in a loop": ["loop:", "\tmov.b32 \t%h0, %t0;", *SUM],
    "summed up twice": [*SUM, product("%z0, %z1", "%f", "%g", "%t0, %t1")],
}


@pytest.mark.parametrize("lines", NOT_JOINED.values(), ids=NOT_JOINED)
def test_not_joined(lines):
    assert same(*lines) == alone(*lines)


def test_nothing_waits_behind_a_pair_that_overwrites_it():
    """The second and third are a pair in the third's place, and overwrite the first's operands there."""
    lines = [
        product("%t0, %t1", "%a", "%b", "%w0, %w1"),
        product("%w0, %w1", "%d", "%e", "%c0, %c1"),
        product("%y0, %y1", "%f", "%e", "%c2, %c3"),
        product("%x0, %x1", "%g", "%h", "%t0, %t1"),
    ]
    assert same(*lines) == [*alone(lines[0]), *joined(*lines[1:3]), *alone(lines[3])]
    assert len(joined(*lines[1:3])) == 1


def test_sum_whose_halves_are_one_register():
    assert len(same(product("%t0, %t1", "%a", "%b", "%c, %c"), product("%x0, %x1", "%d", "%e", "%t0, %t1"))) == 1


# At random.


def _program(rng):
    """Two sums among few registers and what may come between, branches that skip some of it, and stores in the end."""
    one = lambda of: of[rng.integers(len(of))]
    matrices = [f"%m{i}" for i in range(rng.integers(2, 9))]
    pairs = [f"%s{2 * i}, %s{2 * i + 1}" for i in range(rng.integers(2, 13))]
    names = [*matrices, *", ".join(pairs).split(", ")]
    spoils, branches, strange = rng.choice([0, 0.1, 0.3]), rng.choice([0, 0.1]), rng.choice([0, 0.1])
    lines, labels = [], []

    def between():
        if rng.random() < branches:
            labels.append(f"$L{len(labels)}")
            lines.append(f"\t@{one(names)} bra {labels[-1]};")
        if rng.random() < spoils:
            to, x, y = one(names), one(names), one(names)
            what = [
                f"\tmov.b32 \t{to}, {x};",
                f"\tmov.b32 \t{{{one(pairs)}}}, {x};",
                f"\tmov.b32 \t{to}, {{{x}, {y}}};",
                f"\tadd.s32 \t{to}, {x}, {y};",
                f"\tshfl.sync.bfly.b32 \t{to}, {x}, 9, 31, -1;",
                f"\tst.global.b32 [%out], {x};",
            ]
            lines.append(one(what))
        if labels and rng.random() < 0.3 and f"{labels[-1]}:" not in lines:
            lines.append(f"{labels[-1]}:")

    sums = [one(pairs), one(pairs)]
    for _ in range(rng.integers(1, 7)):
        right = one(matrices)
        for i in range(2 if rng.random() < 0.8 else 1):
            between()
            added = sums[i] if rng.random() < 0.8 else one(pairs)
            sums[i] = added if rng.random() < 0.4 else one(pairs)
            b = one(names) if rng.random() < strange else right
            dtype = "bf16" if rng.random() < strange else "f16"
            lines.append(product(sums[i], one(names if rng.random() < strange else matrices), b, added, dtype))
    lines += [f"{label}:" for label in labels if f"{label}:" not in lines]
    stores = [f"\tst.global.b32 [%out], {name};" for name in names if rng.random() < 0.4]
    return names, "\n".join([*lines, *stores]) + "\n"


def test_random_programs(rng):
    """Stored values are the same, whatever was joined; and all kinds of joining take place."""
    kinds = dict.fromkeys(["lone", "pair", "sum", "pair and sum"], 0)
    for _ in range(1500):
        names, text = _program(rng)
        done = joined_products(text)
        start = {name: rng.integers(0, 2**32, 32, dtype=np.uint32) for name in names}
        expected, stored = Machine(start).run(text), Machine(start).run(done)
        assert len(expected) == len(stored), f"{text}\n{done}"
        assert all(map(np.array_equal, expected, stored)), f"{text}\n{done}"
        for depth, zeros in re.findall(r"m16n8k(8|16).*?(%mittens_zero|$)", done, re.MULTILINE):
            kinds[{"8": "lone", "16": "sum"}[depth] if zeros else {"8": "pair", "16": "pair and sum"}[depth]] += 1
    assert min(kinds.values()) > 20, kinds


# In float32.


def fma_towards_zero(a, b, c):
    """The bits of a b + c in float32, cut; in float64 it is exact but for the last bits of one far below the other."""
    exact = a.astype(np.float64) * b + c
    rounded = exact.astype(np.float32)
    below = np.isfinite(exact) & (np.abs(rounded) > np.abs(exact))
    return np.where(below, np.nextafter(rounded, np.float32(0)), rounded).view(np.uint32)


class FloatMachine:
    """Runs the lowered form of a product in float32. A register is 32 lanes of 32 bits."""

    def __init__(self, registers):
        self.registers = {name: np.asarray(values, np.float32).view(np.uint32) for name, values in registers.items()}

    def floats(self, name):
        return self.registers[name].view(np.float32)

    def run(self, line):
        for statement in re.sub(r"\.reg [^;]*;|[{}] |\s[{}]$", "", line.strip()).split(";"):
            if statement.strip():
                with np.errstate(all="ignore"):
                    self._step(*statement.split(None, 1))

    def _step(self, opcode, operands):
        names = re.findall(r"%\w+|0x\w+|\b0\b", re.sub(r"\b0f(?=[0-9A-F]{8}\b)", "0x", operands))
        value = lambda name: self.registers[name] if name.startswith("%") else np.full(32, int(name, 0), np.uint32)
        if opcode.startswith("mma."):
            assert opcode == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
            results, left, right, sums = (group.split(", ") for group in re.findall(r"\{([^}]*)\}", operands))
            cut = lambda name: (value(name) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
            # Registers of a left matrix are by columns 0 to 3 and 4 to 7 and, within them, by rows.
            a = np.block(
                [
                    [cut(left[0]).reshape(8, 4), cut(left[2]).reshape(8, 4)],
                    [cut(left[1]).reshape(8, 4), cut(left[3]).reshape(8, 4)],
                ]
            )
            b = np.block([[cut(right[0]).reshape(8, 4).T], [cut(right[1]).reshape(8, 4).T]])
            c = np.stack([self.floats(name).reshape(8, 4) for name in sums]).astype(np.float64)
            total = (a @ b).reshape(2, 8, 4, 2)
            for i, name in enumerate(results):
                self.registers[name] = (
                    (total[i // 2, :, :, i % 2] + c[i]).astype(np.float32).reshape(32).view(np.uint32)
                )
        elif opcode == "max.f32":  # of NaN and a number the number
            self.registers[names[0]] = np.fmax(self.floats(names[1]), value(names[2]).view(np.float32)).view(np.uint32)
        elif opcode == "fma.rz.f32":
            self.registers[names[0]] = fma_towards_zero(*(value(name).view(np.float32) for name in names[1:]))
        elif opcode == "and.b32":
            self.registers[names[0]] = value(names[1]) & value(names[2])
        elif opcode == "mov.b32":
            self.registers[names[0]] = value(names[1])
        else:
            sign = {"add.rn.f32": 1, "sub.rn.f32": -1}[opcode]
            self.registers[names[0]] = (self.floats(names[1]) + sign * self.floats(names[2])).view(np.uint32)


def float_product(rows, b, c):
    """rows, one or two left matrices above each other, times b, added to c: by what our text becomes."""
    registers, lines = {}, []
    for i, (a, addend) in enumerate(zip(rows, c, strict=True)):
        for j in range(2):
            registers |= {f"%a{i}{j}": a[:, j::2].reshape(32), f"%c{i}{j}": addend[:, j::2].reshape(32)}
        lines.append(product(f"%d{i}0, %d{i}1", f"%a{i}0, %a{i}1", "%b0, %b1", f"%c{i}0, %c{i}1", "f32"))
    for j in range(2):
        registers[f"%b{j}"] = b[j::2].T.reshape(32)  # the right matrix lies transposed
    (line,) = joined(*lines)
    machine = FloatMachine(registers)
    machine.run(line)
    results = []
    for i in range(len(rows)):
        results.append(np.empty((8, 8), np.float32))
        for j in range(2):
            results[i][:, j::2] = machine.floats(f"%d{i}{j}").reshape(8, 4)
    return np.stack(results)


@pytest.mark.parametrize("blocks", [1, 2])
def test_float32(rng, blocks):
    """Of numbers of any size."""
    for _ in range(20):
        a = (rng.normal(size=(blocks, 8, 8)) * 10.0 ** rng.integers(-8, 9, (blocks, 8, 1))).astype(np.float32)
        b = (rng.normal(size=(8, 8)) * 10.0 ** rng.integers(-8, 9, (1, 8))).astype(np.float32)
        c = rng.normal(size=(blocks, 8, 8)).astype(np.float32)
        terms = np.abs(a).astype(np.float64) @ np.abs(b)
        error = np.abs(float_product(a, b, c) - (a.astype(np.float64) @ b + c))
        assert (error <= tolerances.of_tf32_products(terms, c)).all()


def test_float32_is_not_biased(rng):
    """Errors of lower parts are of either sign and do not add up."""
    a, b = (1 + rng.random((2, 500, 8, 8))).astype(np.float32)
    none = np.zeros((1, 8, 8), np.float32)
    errors = [float_product(x[None], y, none)[0] / (x.astype(np.float64) @ y) - 1 for x, y in zip(a, b, strict=True)]
    assert abs(np.mean(errors)) < tolerances.TF32_BIAS


def test_float32_of_the_largest(rng):
    """They are not rounded up to infinity."""
    largest = np.finfo(np.float32).max
    a = rng.choice([largest, -largest], (1, 8, 8)).astype(np.float32)
    b = (rng.normal(size=(8, 8)) * 1e-30).astype(np.float32)
    exact = a[0].astype(np.float64) @ b
    terms = np.abs(a[0]).astype(np.float64) @ np.abs(b)
    product = float_product(a, b, np.zeros((1, 8, 8), np.float32))[0]
    assert (np.abs(product - exact) <= tolerances.of_tf32_products(terms)).all()


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("side", ["left", "right"])
def test_float32_of_inf_and_nan(rng, special, side):
    """A number that is exact in 11 bits has no lower part, which times inf would be NaN."""
    a, b = rng.integers(1, 9, (2, 8, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    b[:, :4] = rng.integers(0, 9, (8, 4))
    (a[0] if side == "left" else b)[2, 3] = special
    c = np.ones((2, 8, 8), np.float32)
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float64) @ b + c
    np.testing.assert_allclose(float_product(a, b, c), expected, rtol=tolerances.SUM, atol=tolerances.SUMS)


# NVIDIA's assembler, and our own kernels.


@needs_ptxas
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_assembles(dtype):
    """All kinds of products, in two entries of one text."""
    lines = [*PAIR, *SUM, *IN_PLACE, "\tbar.sync \t0;", *PAIR, product("%c0, %c1", "%a", "%b", "%x0, %x1")]
    lines = [line.replace(".f16", f".{dtype}") for line in lines]
    names = sorted(set(re.findall(r"%\w+", "\n".join(lines))))
    head = ["{", f"\t.reg .b32 {', '.join(names)};", "\t.reg .b64 %rd1;", "\tld.param.b64 %rd1, [p];"]
    loads = [f"\tld.global.b32 \t{name}, [%rd1+{4 * i}];" for i, name in enumerate(names)]
    stores = [
        line.replace("ld.", "st.").replace(name + ",", "").replace("];", f"], {name};")
        for name, line in zip(names, loads)
    ]
    body = "\n".join([*head, *loads, *lines, *stores, "\tret;", "}"])
    entries = [f".visible .entry {name}(.param .u64 p)\n{body}\n" for name in ("one", "two")]
    text = joined_products(".version 7.8\n.target sm_80\n.address_size 64\n\n" + "".join(entries))
    assert len(set(re.findall(r"m16n8k.*", text))) > 3
    for arch in ("sm_80", "sm_90"):
        assert set(ptxas.assemble({"one": text}, arch)) == {"one", "two"}


def test_random_programs_in_float32(rng):
    """Products wait for each other, four alone or two above each other: their results are the same, bit for bit."""
    most = 0
    for _ in range(300):
        one = lambda of: of[rng.integers(len(of))]
        matrices, pairs = [f"%m{i}" for i in range(rng.integers(3, 8))], [f"%s{2 * i}, %s{2 * i + 1}" for i in range(4)]
        names = [*matrices, *", ".join(pairs).split(", ")]
        lines = []
        for _ in range(8):
            if rng.random() < 0.2:
                lines.append(f"\tmov.b32 \t{one(names)}, {one(names)};")
            left, right = (f"{one(matrices)}, {one(names if rng.random() < 0.1 else matrices)}" for _ in range(2))
            added = one(pairs)
            lines.append(product(added if rng.random() < 0.5 else one(pairs), left, right, added, "f32"))
        done = joined(*lines)
        most = max([most, *(line.count("tf32.tf32") for line in done)])
        start = {name: rng.normal(size=32) for name in names}
        machines = [FloatMachine(start), FloatMachine(start)]
        for machine, text in zip(machines, (alone(*lines), done), strict=True):
            for line in text:
                machine.run(line)
        for name in names:
            np.testing.assert_array_equal(machines[0].floats(name), machines[1].floats(name), err_msg="\n".join(lines))
    assert most == 3 * 4


@needs_ptxas
def test_float32_assembles():
    pair = [product(f"%d{i}, %e{i}", f"%a{i}, %b{i}", "%f0, %f1", f"%d{i}, %e{i}", "f32") for i in range(3)]
    names = sorted(set(re.findall(r"%\w+", "\n".join(pair))))
    loads = [f"\tld.global.b32 \t{name}, [%rd1+{4 * i}];" for i, name in enumerate(names)]
    stores = [f"\tst.global.b32 \t[%rd1+{4 * i}], {name};" for i, name in enumerate(names)]
    head = ["{", f"\t.reg .b32 {', '.join(names)};", "\t.reg .b64 %rd1;", "\tld.param.b64 %rd1, [p];"]
    body = "\n".join([*head, *loads, *pair, *stores, "\tret;", "}"])
    text = joined_products(
        f".version 7.8\n.target sm_80\n.address_size 64\n\n.visible .entry one(.param .u64 p)\n{body}\n"
    )
    assert text.count("mma.sync.aligned.m16n8k8.row.col.f32.tf32") == 6  # of a pair and of one alone
    for arch in ("sm_80", "sm_90"):
        assert ptxas.assemble({"one": text}, arch)["one"].spill_stores == 0


HALVES = [
    (file, variant.name)
    for file in (
        "attention/attention.metal",
        "matmul/gemv_tiles.metal",
        "matmul/nvidia/tiles.metal",
    )
    for variant in frontend.variants(file)
    if "float16" in variant.name
]


@pytest.mark.parametrize("file, name", HALVES, ids=[name for _, name in HALVES])
def test_our_kernels(file, name):
    """They multiply on tensor cores, nearly all matrices two deep or in pairs."""
    text = frontend.ptx(file, name)
    assert "mittens.multiply" not in text
    dtype = "bf16" if name.endswith("bfloat16") else "f16"
    products = re.findall(
        rf"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.f32\.{dtype}\.{dtype}\.f32.*?(mittens|$)", text, re.MULTILINE
    )
    assert len(products) == text.count("mma.sync") > 0
    odd = 2 if "72_72" in name else 0  # nine matrices a row: the last of each has no partner
    assert products.count(("m16n8k8", "mittens")) <= len(products) / 8 + odd


@needs_ptxas
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention(dtype):
    """The products of a tile's scores are joined along the sum, its values' products in pairs."""
    name = f"attention_decode_128_128_{dtype}"
    text = frontend.ptx("attention/attention.metal", name)
    shapes = set(re.findall(r"mma\.sync\.aligned\.(m16n8k\d+).*?(mittens|$)", text, re.MULTILINE))
    assert shapes == {("m16n8k16", "mittens"), ("m16n8k8", "")}
    for arch in ("sm_80", "sm_90"):
        assert ptxas.assemble({name: text}, arch)[name].spill_stores == 0
