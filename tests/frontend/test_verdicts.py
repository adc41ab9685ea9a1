"""The verdict of `check` on small kernels: kernels that Apple's compiler takes pass, others are refused by line."""

import json
import re

import pytest
from helpers.dialect_cases import ACCEPTED, HEADER, REFUSED, UNCOVERED, on

from mlx_mittens import frontend
from mlx_mittens.cli.main import main
from mlx_mittens.frontend.check import dialect
from mlx_mittens.frontend.errors import NOTE


def checked(name, text, **options):
    frontend.register_source(f"{name}.metal", HEADER + text)
    return dialect.check(f"{name}.metal", dialect.Options(**options))


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_apple_takes_passes(name):
    assert [problem for problem in checked(name, ACCEPTED[name]) if problem.severity != NOTE] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_apple_refuses_is_refused_at_its_line(name):
    line, part, text = REFUSED[name]
    found = checked(name, text)
    assert any(re.search(part, problem.what) for problem in found), found
    assert {(problem.line, problem.file) for problem in found} == {(line, f"{name}.metal")}, found
    for problem in found:
        assert 1 <= problem.column <= len((HEADER + text).splitlines()[line - 1]) + 1


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_is_not_covered_is_said(name):
    assert {problem.severity for problem in checked(name, UNCOVERED[name])} == {"not covered"}


def test_a_problem_has_the_column_of_its_word():
    text = "#define TWICE(x) ((x) + (x))\n" + on("float", "a[i] = TWICE(a[i]) + unknown;")
    (problem,) = checked("column", text)
    line = text.splitlines()[1]
    assert (problem.line, problem.column) == (4, line.index("unknown") + 1)


def test_all_problems_of_a_file_are_said():
    text = on("float", "double d = 1;\n a[i] = unknown;\n a[i] = float2(1, 2, 3).x;\n a[i] = expf(1); bfloat b = 1.5f;")
    assert [problem.line for problem in checked("many", text)] == [3, 4, 5, 6, 6]


def test_a_mistake_within_a_library_function_is_said_of_the_users_line():
    found = checked("inside", on("float", "a[i] = 1;\n a[i] = as_type<float>(ushort(1));"))
    assert {problem.file for problem in found} == {"inside.metal"} and {problem.line for problem in found} == {4}


def test_language_versions():
    text = on("float", "auto twice = [](float x) { return 2 * x; }; a[i] = twice(a[i]);")
    assert "lambda" in checked("lambda", text)[0].what
    assert checked("lambda", text, standard="metal3.2") == []
    fence = on(
        "float", "a[i] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
    )
    assert checked("fence", fence) != [] and checked("fence", fence, standard="metal3.2") == []
    guarded = "#if __METAL_VERSION__ < 320\n#error too old\n#endif\n" + on("float", "a[i] = 1;")
    assert checked("old", guarded) != [] and checked("old", guarded, standard="metal4.0") == []


def test_a_file_of_many_kernels():
    head = (
        "struct Pair { float low, high; };\n"
        "template <typename T, int n> kernel void f(device T* a [[buffer(0)]], device Pair* p [[buffer(1)]]) {\n"
        " threadgroup float s[n * 64]; s[0] = 1; Pair q = p[n]; a[n] = T(q.low + s[0]); BODY }\n"
    )
    lines = [
        f'template [[host_name("f{n}")]] kernel void f<float, {n}>(device float*, device Pair*);\n'
        for n in range(1, 251)
    ]

    def problems(body, n=120):
        return [
            (p.severity, p.line, p.what)
            for p in checked(
                "crowd",
                head.replace("BODY", body) + "".join(lines[:n]),
            )
        ]

    assert problems("", 250)[0][0] == "warning" and "more than 32768" in problems("", 250)[0][2]
    assert problems("", 127) == [] and problems('static_assert(n < 249 || n > 249, "249");', 248)[1:] == []
    found = problems('static_assert(n != 211, "not 211");', 220)
    assert ("error", 5) in [problem[:2] for problem in found] and any("211" in problem[2] for problem in found)


class TestCommand:
    def test_headers_and_macros(self, tmp_path, capsys):
        (tmp_path / "beside.h").write_text("inline float twice(float x) { return 2 * x; }\n")
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "other.h").write_text("inline float thrice(float x) { return 3 * x; }\n")
        file = tmp_path / "mine.metal"
        text = '#include "beside.h"\n#include "other.h"\n#include <other.h>\n'
        file.write_text(HEADER + text.replace("<other.h>", '"other.h"') + on("float", "a[i] = twice(thrice(SCALE));"))
        assert main(["check", str(file)]) == 1
        assert f'{file}:4:1: error: there is no header "other.h"' in capsys.readouterr().out
        arguments = ["check", str(file), "-I", str(tmp_path / "more"), "-D", "SCALE=2"]
        (tmp_path / "more" / "other.h").write_text("#pragma once\ninline float thrice(float x) { return 3 * x; }\n")
        assert main(arguments) == 0

    def test_exit_statuses(self, tmp_path, capsys):
        paths = {}
        for name, text in (
            ("good", on("float", "a[i] = 1;")),
            ("bad", on("float", "double d;")),
            ("far", UNCOVERED["texture"]),
        ):
            paths[name] = tmp_path / f"{name}.metal"
            paths[name].write_text(HEADER + text)
        assert main(["check", str(paths["good"])]) == 0
        assert main(["check", str(paths["good"]), str(paths["far"])]) == 2
        assert main(["check", str(paths["bad"]), str(paths["far"])]) == 1
        assert "not covered: 'texture2d' is not covered by this check" in capsys.readouterr().out
        assert main(["check", str(paths["good"]), "-I", str(tmp_path / "none")]) == 2

    def test_json(self, tmp_path, capsys):
        file = tmp_path / "bad.metal"
        file.write_text(HEADER + on("float", "double d = 1; a[i] = d;"))
        assert main(["check", "--json", str(file)]) == 1
        (report,) = json.loads(capsys.readouterr().out)["files"]
        assert (report["file"], report["verdict"]) == (str(file), "refused")
        (problem,) = report["problems"]
        assert problem["file"] == str(file) and (problem["line"], problem["severity"]) == (3, "error")
        assert "no double" in problem["message"] and problem["column"] > 1

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "kernel",
            "kernel void k(",
            "}",
            "template <",
            '"',
            "/*",
            "\x00",
            "#if 1",
            "[[",
            "é",
            "kernel void k() {}",
        ],
    )
    def test_whatever_a_file_holds_there_is_a_verdict(self, text, tmp_path, capsys):
        file = tmp_path / "odd.metal"
        file.write_text(text)
        assert main(["check", str(file)]) in (0, 1, 2)
