"""``zf-profile layout``: what it prints, writes and refuses, and what it does not import."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from zf_layouts import draw, draw_svg
from zf_layouts.page import PageLayout
from zf_profile import layout as command
from zf_profile.console import Exit, UserError

ROOT = Path(__file__).parents[2]
DEFAULT = PageLayout(8, 128, 16)


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def run(*words):
    """Exit code, as the tool's entry point gives it."""
    try:
        return command.run(parse(*words))
    except UserError as error:
        return error.code
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize("lane", [None, 0, 17])
@pytest.mark.parametrize("what", draw.PICTURES)
def test_prints_the_picture_whole(capsys, what, lane):
    assert run(what, *(() if lane is None else ("--lane", lane))) == Exit.DONE
    printed = capsys.readouterr()
    assert printed.out == draw.text(what, DEFAULT, lane)
    assert printed.err == ""


def test_lane_is_listed(capsys):
    run("k", "--lane", 5)
    out = capsys.readouterr().out
    assert "[ 5:0  5:1]" in out
    assert "K tile 1" in out
    assert "(1,66)    (1,67)    (9,66)    (9,67)    (1,74)    (1,75)    (9,74)    (9,75)" in out
    assert "low bytes   80..95" in out
    assert "code bytes  552..559" in out
    assert "raw bytes   80..95 and 592..607" in out


def test_shape_options_reach_the_picture(capsys):
    words = "--head-dim 64 --page-size 32 --kv-heads 6 --rope interleaved --heads-per-span 3"
    run("page", *words.split(), "--max-exceptions", 2, "--json", "-")
    shape = json.loads(capsys.readouterr().out)["layout"]
    assert shape == draw.sizes(PageLayout(6, 64, 32, "interleaved", 2, 3))
    run("k", *words.split())
    assert "block 0   tokens 0..15   tile 0 dims 0..15     tile 1 dims 16..31" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("what", draw.PICTURES)
def test_svg_file_is_the_drawing(tmp_path, capsys, what):
    path = tmp_path / "picture.svg"
    assert run(what, "--lane", 9, "--svg", path) == Exit.DONE
    assert path.read_text(encoding="utf-8") == draw_svg.svg(what, DEFAULT, 9)
    assert list(tmp_path.iterdir()) == [path]
    assert f"wrote {path}" in capsys.readouterr().err


def test_json_lists_the_values_of_a_lane(capsys):
    run("v", "--lane", 17, "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "zf-profile/1"
    assert (document["command"], document["what"], document["lane"]) == ("layout", "v", 17)
    assert len(document["values"]) == 16
    for value in document["values"]:
        place = (value["block"], value["tile"], value["lane"], value["v"])
        assert DEFAULT.locate("v", value["token"], value["dim"]) == place


@pytest.mark.parametrize(("what", "count"), [("k", 512), ("v", 512), ("block", 128), ("page", 72)])
def test_json_file_beside_the_text(tmp_path, capsys, what, count):
    path = tmp_path / "layout.json"
    assert run(what, "--json", path) == Exit.DONE
    document = json.loads(path.read_text())
    assert document["lane"] is None
    assert len(document["values"]) == count
    assert capsys.readouterr().out == draw.text(what, DEFAULT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lane", 32), "--lane 32: lanes are 0 to 31"),
        (("--lane", -1), "--lane -1: lanes are 0 to 31"),
        (("--kv-heads", 0), "--kv-heads 0: choose 1 to 1024"),
        (("--kv-heads", 10**9), "--kv-heads 1000000000: choose 1 to 1024"),
        (("--heads-per-span", 3), "choose one of 1, 2, 4, 8"),
        (("--heads-per-span", -1), "choose one of 1, 2, 4, 8"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_written(tmp_path, capsys, words, message):
    path, document = tmp_path / "picture.svg", tmp_path / "layout.json"
    args = parse("page", *words, "--svg", path, "--json", document)
    with pytest.raises(UserError, match=message) as refused:
        command.run(args)
    assert refused.value.code == Exit.USAGE
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [("--head-dim", 96), ("--page-size", 8), ("--rope", "none"), ("--max-exceptions", 5)],
)
def test_values_outside_the_choices_are_usage_errors(words):
    assert run("page", *words) == Exit.USAGE


@pytest.mark.parametrize("target", ["missing/picture.svg", ".", "", "-"])
def test_unwritable_svg_is_refused(tmp_path, capsys, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--svg") as refused:
        command.run(parse("k", "--svg", target))
    assert refused.value.code == Exit.USAGE
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_one_file_cannot_be_both_svg_and_json(tmp_path):
    path = tmp_path / "both"
    assert run("k", "--svg", path, "--json", path) == Exit.USAGE
    assert not path.exists()


def test_works_without_torch_and_cutlass():
    program = (
        "import sys, argparse\n"
        "sys.modules['torch'] = sys.modules['cutlass'] = None\n"
        "from zf_profile import layout\n"
        "assert 'rich' not in sys.modules\n"
        "parser = argparse.ArgumentParser()\n"
        "layout.add_arguments(parser)\n"
        "sys.exit(layout.run(parser.parse_args(['block', '--lane', '5'])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'layouts'}:{ROOT / 'tools'}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == draw.text("block", DEFAULT, 5)


def test_help_names_defaults_and_examples():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "json"):
            assert "default" in action.help, action.dest
    assert command.EXAMPLES.startswith("examples:\n  zf-profile layout ")
    assert "\n" not in command.SUMMARY
