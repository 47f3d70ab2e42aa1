"""Help texts: each stands alone, says what the flag means, and there is one for every flag that is parsed."""

import io
import re
from contextlib import redirect_stdout

import pytest
import tyro

import recollect
from recollect import cli
from recollect.commands import help
from recollect.commands.data import DATA, DataTop

COMMANDS = {name: kind for name, kind in cli.KINDS.items() if kind is not DataTop}
COMMANDS |= {f"data {name}": kind for name, kind in DATA.items()}
LEANING = "of|and|or|to|its|their|the same|instead|as|so|where|also|only|with|without|for|below|above"  # on a neighbour


@pytest.fixture
def shown(capsys):
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            cli.parse(list(words))
        assert not stopped.value.code
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_text_stands_alone(name):
    found = list(help.options(COMMANDS[name]))
    assert len({option.name for option in found}) == len(found)
    for option in found:
        words = re.sub(r" \(default:.*\)$", "", option.words)
        assert not re.match(rf"({LEANING})\b", words), option
        assert not re.search(r"\b(below|above|None})\b", words), option
        assert re.match(r"[a-z]", words), option
        assert len(words.split()) > 2 or option.shown.startswith("--encoder"), option
        assert words[-1] not in ".,:;", option
        assert words.count("(") == words.count(")"), option
        assert "None" not in option.shown, option


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_flags_that_are_parsed(name, shown):
    written = io.StringIO()
    with redirect_stdout(written), pytest.raises(SystemExit):
        tyro.cli(cli._commands(cli.NAMED), args=[*name.split(), "--help"], prog="recollect")
    parsed = set(re.findall(r"^\W (--[a-z][a-z-]*)", written.getvalue(), re.MULTILINE))
    listed = set(re.findall(r"^  (--[a-z-]+)", shown(*name.split(), "--help-all"), re.MULTILINE))
    assert listed == parsed


def test_the_most_used_options_come_first(shown):
    for name, first in help.FIRST.items():
        flags = re.findall(r"^  --([a-z-]+)", shown(name, "--help"), re.MULTILINE)
        every = [option.name.replace("_", "-") for option in help.options(COMMANDS[name]) if option.is_flag]
        assert set(flags) <= set(every)
        if len(every) > help.MANY:
            assert flags == first.replace("_", "-").split()
            assert f"{len(every) - len(flags)} more options: recollect {name} --help-all" in shown(name, "--help")
    assert "--checkpoint-seconds" in shown("distill", "--help-all")
    assert "--checkpoint-seconds" not in shown("distill", "--help")


def test_presets_and_streams_decide_the_defaults_that_are_shown(shown):
    assert "(default: 50000)" in shown("distill", "--preset", "paper", "--help")
    assert "multiple" in shown("distill", "--help-all")
    rotations, many = (shown("continual", stream, "--help-all") for stream in ("rotations", "many"))
    assert re.search(r"--tasks INT .*?\(default: 20\)", rotations, re.DOTALL)
    assert re.search(r"--tasks INT .*?\(default: 100\)", many, re.DOTALL)


def test_a_flag_that_turns_something_off_says_so(shown):
    assert "leave out the networks that are trained on random real images" in " ".join(shown("evaluate", "-h").split())


def test_overviews_and_the_version(shown):
    text = shown("--help")
    assert all(f"\n  {name} " in text for name in cli.KINDS)
    assert shown("--version") == f"recollect {recollect.__version__}\n"
    assert all(f"\n  {name} " in shown("data", "--help") for name in DATA)


def test_shells_complete_flags(shown):
    script = shown("--tyro-print-completion", "bash")
    assert "--inner-steps" in script
    assert "evaluate" in script
