"""report: what fits is measured, what fails leaves the rest, and the command says so."""

import json
import re
import signal

import numpy as np
import pytest
import torch
from conftest import tiny_model, word_tokenizer
from pages import Page, read

import rope_probe as rp
from rope_probe.errors import UsageError
from rope_probe.reporting import plan
from rope_probe.reporting.record import MEASURED
from rope_probe.reporting.sections import ABOUT

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = list(ABOUT)


@pytest.fixture
def tokens(tmp_path, ids):
    """A token file of segments that are long enough for every analysis."""
    np.save(tmp_path / "tokens.npy", ids)
    return tmp_path / "tokens.npy"


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 97, (4, 64))


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of the time; here for tests that look at something else."""
    monkeypatch.setattr("rope_probe.reporting.page._figures", lambda section: {})


# --- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "value"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1.5 m", 90), (7.5, 7.5)])
def test_times(words, value):
    assert plan.seconds(words) == value


@pytest.mark.parametrize("words", ["", "10", "ten", "0m", "-5m", "5d", "1h30m", 0, -1, float("nan"), True, None])
def test_what_is_no_time(words):
    with pytest.raises(UsageError, match="give a time like 90s, 10m or 1h"):
        plan.seconds(words)


def test_as_much_as_fits_is_read():
    trial = plan.Trial(bare=1.0, likelihood=1.5)
    chosen = plan.choose(trial, plan.COSTS, 1e6, 1e6, 16)
    assert chosen == {name: 16 if cost.reads else 2 for name, cost in plan.COSTS.items()}
    for budget in np.geomspace(1, 1000, 40):
        chosen = plan.choose(trial, plan.COSTS, budget, budget, 16)
        takes = sum(trial.cost(name, count) for name, count in chosen.items())
        assert takes <= budget and all(count >= 2 for count in chosen.values())
        missing = [name for name in plan.COSTS if name not in chosen and plan.COSTS[name].share == 1]
        fewest = sum(trial.cost(name, 2) for name in chosen)
        assert all(fewest + trial.cost(name, 2) > budget for name in missing)  # none was left out for a longer reading


def test_nothing_is_asked_for_that_is_not_there():
    trial = plan.Trial(bare=0.01, likelihood=0.01)
    assert set(plan.choose(trial, MEASURED, 1e6, 1e6, 5).values()) == {5}
    assert set(plan.choose(trial, MEASURED, 1e6, 1e6, 1).values()) == {1}


def test_a_budget_that_is_too_small_says_what_is_left_out(no_figures, ids, tmp_path):
    told = []
    report = rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=ids, budget=1e-3, tell=told.append)
    assert [section.name for section in report.sections] == ["inspect"] and set(report.left_out) == set(ALL[1:])
    plan_line, rest = told
    assert plan_line.startswith("plan for 1 s: no reading")
    assert rest.startswith("left out: bands (would take about 1 s for 2 segments), heads (")
    text, _ = read(report)
    assert "Frequency band was left out: would take about 1 s for 2 segments." in text


def test_what_is_slower_than_estimated_leaves_less_for_the_rest(no_figures, ids, tmp_path, monkeypatch):
    from rope_probe.probes.bands import bands

    def slow(*args, **kwargs):
        now[0] += 1000
        return bands(*args, **kwargs)

    now = [0.0]
    monkeypatch.setattr("rope_probe.probes.bands.bands", slow)
    monkeypatch.setattr("rope_probe.reporting.run.time.perf_counter", lambda: now[0])
    report = rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=ids, budget=600)
    assert list(report.results) == ["bands"]
    assert report.left_out["heads"] == "no time was left"


# --- what goes wrong -------------------------------------------------------------------------------------------------


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_an_analysis_that_fails_leaves_the_others(no_figures, run_cli, tiny_folder, tokens, monkeypatch):
    errors = {
        "heads": (
            rp.ProbeError("the queries <of> layer 1 are not finite."),
            "the queries &lt;of&gt; layer 1 are not finite.",
        ),
        "similarity": (torch.OutOfMemoryError("CUDA"), "out of memory: use a smaller --batch"),
        "truncate": (ZeroDivisionError("by zero"), "unexpected ZeroDivisionError: by zero"),
    }
    for name, (error, _) in errors.items():
        monkeypatch.setattr(f"rope_probe.probes.{name}.{name}", failing(error))
    done = run_cli("report", tiny_folder, "--tokens", tokens, "-o", "r.html")
    assert done.code == 1 and "report   r.html" in done.out
    assert (
        "rope-probe: r.html is written, without heads: the queries <of> layer 1 are not finite.; similarity" in done.err
    )
    with open("r.html", encoding="utf-8") as stream:
        text = stream.read()
    page = Page(text)
    assert {"bands", "spectrum"} <= set(page.ids)
    for _, words in errors.values():
        assert words in text


def test_a_table_or_figure_that_fails_leaves_the_others(ids, tmp_path, monkeypatch):
    monkeypatch.setattr("rope_probe.cli.tables.bands.render", failing(KeyError("mode")))
    monkeypatch.setitem(rp.plot.FIGURES["heads"], "roles", failing(ValueError("no room")))
    text, page = read(rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=ids))
    assert "Not shown: KeyError" in text and "Not shown: ValueError, no room" in text
    assert {"bands-profile-caption", "heads-wavelength-caption"} <= set(page.ids)


@pytest.mark.parametrize("after", [2, 0])
def test_ctrl_c_writes_what_was_measured(no_figures, ids, tmp_path, after):
    def press(name, done, total):
        if name == "similarity" and done == after:
            signal.raise_signal(signal.SIGINT)

    report = rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=ids, batch=1, progress=press)
    assert report.partial and list(report.results) == ["bands", "similarity"][: 2 if after else 1]
    assert report.left_out["truncate"] == "interrupted before"
    text, _ = read(report)
    assert "The run was interrupted" in text
    if after:
        assert report.results["similarity"].attrs["segments"] == 2 and "Interrupted: 2 segments were read." in text
    else:
        assert "Similarity</a> is missing: interrupted before anything was measured." in text


def test_the_command_says_that_it_was_interrupted(no_figures, run_cli, tiny_folder, tokens, monkeypatch):
    monkeypatch.setattr("rope_probe.probes.heads.heads", failing(KeyboardInterrupt()))
    done = run_cli("report", tiny_folder, "--tokens", tokens, "-o", "r.html", "--json")
    assert done.code == 1 and done.err.endswith("rope-probe: stopped before the end; r.html holds what was measured.\n")
    assert json.loads(done.out)["partial"] is True


def test_a_later_failure_in_one_analysis_is_no_interrupt(no_figures, tmp_path, ids):
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    clean = np.where(ids == 96, 2, ids)
    clean[3, 7] = 96
    with pytest.warns(rp.ProbeWarning, match="stopped after 3 of 4 segments"):
        report = rp.report(rp.open(model), tmp_path / "r.html", tokens=clean, batch=1)
    assert not report.partial and set(MEASURED) == set(report.results) | set(report.failed)
    assert report.results["bands"].attrs["segments"] == 3


def test_a_full_disk_keeps_the_old_page(ids, tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    old = '<meta name="generator" content="rope-probe">old'
    path.write_text(old)
    monkeypatch.setattr("rope_probe.reporting.page.replace_file", failing(OSError(28, "No space left on device")))
    with pytest.raises(rp.ProbeError, match="cannot write .*r.html: No space left on device"):
        rp.report(rp.open(tiny_model()), path, tokens=ids, budget=0.01)
    assert path.read_text() == old


def test_what_comes_from_outside_is_text(ids, tmp_path):
    model, evil = tiny_model(), "<script>alert(1)</script>[/bold]\"'><img src=x onerror=alert(2)>"
    model.config._name_or_path = evil
    text, page = read(rp.report(rp.open(model), tmp_path / "r.html", tokens=ids, command=f"rope-probe report '{evil}'"))
    assert not {"script", "img"} & set(page.tags)
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;alert(1)" in text
    assert not re.search(r"<[^>]* on\w+=", re.sub(r'"[^"]*"', '""', text))


def test_messages_to_many_analyses_are_said_once(no_figures, tmp_path, recwarn):
    long = np.random.default_rng(0).integers(2, 97, (2, 80))
    text, _ = read(rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=long))
    words = "segments of 80 tokens are longer than the 64 the model was made for"
    assert sum(words in str(one.message) for one in recwarn) == 1 == text.count(words)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(no_figures, run_cli, tiny_folder, tokens):
    done = run_cli("report", tiny_folder, "--tokens", tokens, "--segments", "2", "--budget", "5m")
    assert done.code == 0, done.err
    assert done.err.startswith(
        "plan for 5 min: bands 2, heads 2, similarity 2, truncate 2, spectrum 2 segments of 64 tokens"
    )
    assert "Frequency band" in done.out and "report   report-tiny.html (" in done.out
    with open("report-tiny.html", encoding="utf-8") as stream:
        text = stream.read()
    assert f"rope-probe report {tiny_folder}" in text
    done = run_cli("report", tiny_folder, "--tokens", tokens, "--json")
    values = json.loads(done.out)
    assert values["output"] == "report-tiny-2.html" and values["analyses"]["bands"]["segments"] == 4


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (["--budget", "soon"], "--budget is 'soon': give a time like 90s, 10m or 1h.", 2),
        (["-o", "report.pdf"], "the page is report.pdf: its name must end in .html.", 2),
        (["-o", "index.html"], "index.html exists and is not a report: give another name, or remove it first.", 1),
        (["-o", "no/such/r.html"], "the folder no/such does not exist", 1),
        (["--segments", "0"], "--segments is 0: give a positive number.", 2),
        (["--text", "missing.txt"], "cannot read the text missing.txt", 1),
    ],
)
def test_bad_input_is_refused_before_a_model_is_opened(run_cli, no_opening, options, words, code):
    with open("index.html", "w") as stream:
        stream.write("<!DOCTYPE html><title>my page</title>")
    run_cli("report", "demo:smollm2", *options).refused(words, code=code)


def test_several_processes_are_refused(ids, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="leave out torchrun"):
        rp.report(rp.open(tiny_model()), tmp_path / "r.html", tokens=ids)


def test_a_text_is_read_with_the_models_tokenizer(no_figures, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text(" ".join(f"w{number}" for number in np.random.default_rng(0).integers(2, 97, 400)))
    report = rp.report(
        rp.open(tiny_model(), tokenizer=word_tokenizer()), tmp_path / "r.html", text=str(text), length=32
    )
    assert report.results["bands"].attrs["corpus"] == "notes.txt" and report.about["text"] == "notes.txt"
