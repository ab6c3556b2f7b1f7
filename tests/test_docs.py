"""What the documents say is there: links, images, commands with their options, and names in Python."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import rope_probe as rp
from rope_probe.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
COMMANDS = typer.main.get_command(app).commands
FOREIGN = {"--nproc-per-node", "--no-deps", "--help"}  # options of other programs, and the one that all have

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page):
    return re.findall(r"(?ms)^```[a-z]*\n(.*?)^```", page.read_text())


def prose(page):
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def anchors(page):
    """Those that a page has on GitHub."""
    headings = re.findall(r"(?m)^#+ (.*)", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page):
    """Arguments of every `rope-probe …` in a code block or between backticks; what is left open (…) is left out."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))]:
        match = re.match(r"(?:\$ |torchrun .*-m )?rope[-_]probe +(.*)", line)
        if match:
            words = shlex.split(match[1].split("|")[0], comments=True)
            if words and words[0] in COMMANDS and "…" not in words:
                yield words


@every_page
def test_links_and_images_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists() and ROOT in (there, *there.parents), target
        assert not anchor or anchor in anchors(there), target


@every_page
def test_commands_can_be_given_like_this(page):
    for name, *words in commands(page):
        if words != ["--help"]:
            COMMANDS[name].make_context(name, list(words))  # parses, and runs nothing


@every_page
def test_options_are_those_of_a_command(page):
    known = {option for command in COMMANDS.values() for one in command.params for option in one.opts}
    known |= {option for command in COMMANDS.values() for one in command.params for option in one.secondary_opts}
    known |= {option for one in typer.main.get_command(app).params for option in one.opts} | FOREIGN
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
    others = {
        option
        for word in (r"git .*", r"python (?:benchmarks|notebooks)/.*")
        for line in re.findall(word, page.read_text())
        for option in re.findall(r"--[a-z-]+", line)
    }
    assert found - others <= known, found - others - known


def test_the_readme_shows_every_command():
    assert {name for name, *_ in commands(ROOT / "README.md")} == set(COMMANDS)


def test_examples_of_the_command_line_can_be_given_too():
    for name, command in COMMANDS.items():
        (example,) = re.findall(rf"Example: +rope-probe {name} (.*)", command.help)
        command.make_context(name, shlex.split(example))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_section_and_a_page(name):
    readme = (ROOT / "README.md").read_text()
    section = re.search(rf"(?ms)^## `{name}`.*?(?=^## )", readme)
    assert section and f"(docs/{name}.md)" in section[0]
    assert (ROOT / "docs" / f"{name}.md").read_text().startswith(f"# `{name}`")


@every_page
def test_python_names_exist(page):
    text = page.read_text()
    for name in re.findall(r"\brp\.plot\.(\w+)", text):
        assert name in rp.plot.__all__, name
    for name in re.findall(r"\brp\.(\w+)", text):
        assert name in rp.__all__, name
    for name in re.findall(r"(?m)^\$? *make ([a-z-]+)", "\n".join(blocks(page))):
        assert re.search(rf"(?m)^{name}:", (ROOT / "Makefile").read_text()), name
