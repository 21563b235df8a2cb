"""Configurations of experiments: unfolding, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from experiment_runs import BASELINE, FIXED, RATIO, parse, text_of
from rotor.models import workloads

from rotor.experiments import configuration


def test_lists_are_unfolded_the_last_varying_fastest():
    config = parse(
        BASELINE,
        FIXED
        | {
            "batch_size": [1, 2],
            "use_sampling": False,
            "extra_params": {"depth": [3, 4], "widths": [[5, 6]], "heuristic": "LRU"},
        },
        default={"batch_size": 9, "timeout": 5},
    )
    first, *others = config.trials
    assert (first.type, first.batch_size, first.options["timeout"]) == ("baseline", 9, 5.0)
    found = [(t.batch_size, t.params["depth"], t.budget_bytes) for t in others]
    assert found == [(b, d, m) for b in (1, 2) for d in (3, 4) for m in (8_000_000, None)]
    assert [trial.command_id for trial in config.trials] == list(range(9))
    assert all(trial.params["widths"] == [5, 6] for trial in others)
    assert all(trial.options["heuristic"] == "LRU" for trial in others)
    assert not any(trial.samples(trial.budget_bytes) for trial in others)


def test_sampling_can_be_left_off_in_small_budgets():
    extra = {"use_sampling": True, "no_sampling_below_budget": "5 MB"}
    trials = parse(FIXED | {"memory_budget": ["4MB", "5MB", "inf"], "extra_params": extra}).trials
    assert [t.samples(t.budget_bytes) for t in trials] == [False, False, True]
    extra = {"no_sampling_below_ratio": 0.4}
    trials = parse(RATIO | {"ratio": [0.3, 0.4, 0.5], "extra_params": extra}).trials
    assert [t.samples(1) for t in trials] == [False, False, True]
    extra = {"no_sampling_below_budget": -1, "no_sampling_below_ratio": -1}
    trials = parse(FIXED | {"memory_budget": ["4MB"], "extra_params": extra}).trials
    assert trials[0].samples(4_000_000)


SETTINGS = "$.dtr_settings"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dry_run": True}, "$.dry_run = true, expected a whole number of 0 or more: runs that"),
        ({"sizes": "big"}, '$.sizes = "big", expected one of published, small'),
        ({"n_reps": 0}, "$.n_reps = 0, expected a whole number of 1 or more"),
        ({"n_inputs": True}, "$.n_inputs = true, expected a whole number"),
        ({"active": 1}, "$.active = 1, expected true or false"),
        ({"log_dest": ""}, '$.log_dest = "", expected text'),
        ({"models": []}, "$.models = [], expected a list of at least one model"),
        ({"models": ["one", "one"]}, '$.models[1] = "one", expected each model once'),
        ({"models": ["two"]}, '$.models[0] = "two" has no commands, expected $.dtr_settings.two'),
        ({"dtr_settings": []}, f"{SETTINGS} = [], expected an object"),
        ({"dtr_settings": {"one": []}}, f"{SETTINGS}.one = [], expected a list of at least one"),
        (
            {"dtr_settings": {"default": {"timeout": -1}, "one": [BASELINE]}},
            f"{SETTINGS}.default.timeout = -1, expected a number above 0: seconds",
        ),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError) as caught:
        parse(BASELINE, **change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (3, " = 3, expected an object"),
        ({"type": "x"}, '.type = "x", expected one of baseline, dtr, simrd'),
        ({}, ".type = null, expected one of"),
        ({"type": "dtr"}, ".kind = null, expected one of fixed, ratio, param_sweep"),
        (BASELINE | {"kind": "quick"}, '.kind = "quick", expected one of fixed, ratio, param_s'),
        (BASELINE | {"ratio": [1]}, '.ratio = [1], expected none: the command is "baseline"'),
        ({"type": "dtr", "kind": "fixed"}, " has no memory_budget, expected a list of at least o"),
        (FIXED | {"ratio": [0.5]}, '.ratio = [0.5], expected none: the command is "fixed"'),
        ({"type": "simrd"}, " has no memory_budget and no ratio"),
        (FIXED | {"memory_budget": []}, ".memory_budget = [], expected a list of at least one"),
        (FIXED | {"memory_budget": [1, 0]}, ".memory_budget[1] = 0, expected bytes, text such as"),
        (FIXED | {"memory_budget": ["x"]}, '.memory_budget[0] = "x", expected bytes'),
        (RATIO | {"ratio": [-1]}, ".ratio[0] = -1, expected a number above 0"),
        (FIXED | {"batch_size": [2, 0]}, ".batch_size = 0, expected a whole number of 1 or more"),
        (FIXED | {"batch_size": []}, ".batch_size = [], expected a value, or a list"),
        (FIXED | {"extra_params": []}, ".extra_params = [], expected an object"),
        (FIXED | {"extra_params": {"a": {}}}, ".extra_params.a = {}, expected a number, text"),
        (FIXED | {"extra_params": {"kind": 1}}, ".extra_params.kind is in extra_params"),
        (FIXED | {"extra_params": {"heuristic": "x"}}, '.heuristic = "x", expected one of DTR, '),
        (
            FIXED | {"timeout": 3, "extra_params": {"timeout": 4}},
            ".extra_params.timeout is in $.dtr_settings.one[0].timeout too",
        ),
        (
            {"type": "simrd", "ratio": 1, "extra_params": {"runtime": "V1", "heuristic": "DTR"}},
            "it serves",
        ),
    ],
)
def test_wrong_commands_are_named(command, words):
    with pytest.raises(ValueError) as caught:
        parse(command)
    assert str(caught.value).startswith("$.dtr_settings.one[0]")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"models": 1, "models": 2}', 'the key "models" occurs twice'),
        ('{"seed": Infinity}', "Infinity is not JSON"),
        ("{", "malformed JSON"),
        ("[]", "$ = [], expected an object"),
    ],
)
def test_what_is_no_json_is_refused(text, words):
    with pytest.raises(ValueError, match=words.replace("$", r"\$").replace("[]", r"\[\]")):
        configuration.parse(text, "test")


def test_models_and_their_parameters_are_checked_where_they_are_known():
    command = BASELINE | {"extra_params": {"deph": 3, "depth": 4}}
    known = {"one": ["depth"], "two": []}
    config = configuration.parse(text_of(command), "test", models=known)
    assert config.unknown == ('$.dtr_settings.one[0].extra_params.deph (did you mean "depth"?)',)
    assert config.trials[0].params == {"depth": 4}
    with pytest.raises(
        ValueError, match=r'\$.models\[0\] names no model: "one", expected one of t'
    ):
        configuration.parse(text_of(BASELINE), "test", models={"two": []})


def test_every_shipped_configuration_is_right():
    assert {"quick", "get_log", "run_graphs", "large_inputs", "encoders"} <= set(
        configuration.shipped()
    )
    known = {name: workloads.accepted(name) for name in workloads.names()}
    for name in configuration.shipped():
        config = configuration.load(name, models=known)
        assert config.description
        assert config.active
        assert config.ignored == config.unknown == ()
        for trial in config.trials:
            given = trial.params | {"batch_size": trial.batch_size}
            defaults = workloads.parameters(trial.model)
            for key, value in workloads.from_published(trial.model, given).items():
                assert type(value) is type(defaults[key]), (name, trial.model, key)


@pytest.mark.parametrize(
    ("name", "models", "baselines", "limited", "replays"),
    [
        ("get_log", 11, 0, 11, 0),
        ("run_graphs", 8, 8, 32, 0),
        ("large_inputs", 4, 16, 16, 0),
        ("encoders", 3, 3, 27, 24),
        ("quick", 4, 4, 19, 13),
    ],
)
def test_shipped_configurations_unfold_to_what_was_published(
    name, models, baselines, limited, replays
):
    config = configuration.load(name)
    assert len(config.models) == models
    types = [trial.type for trial in config.trials]
    found = tuple(types.count(kind) for kind in ("baseline", "dtr", "simrd"))
    assert found == (baselines, limited, replays)
    # A sweep has as many points with a budget as without; a graph a baseline for each model.
    assert {trial.model for trial in config.trials} == set(config.models)
    assert all(trial.budget_bytes is None for trial in config.trials if trial.ratio is not None)


def test_a_folder_of_a_shipped_name_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "quick").mkdir()
    monkeypatch.chdir(tmp_path)
    assert configuration.load("quick").name == "quick"


def test_configurations_are_found_by_name_or_path(tmp_path):
    path = tmp_path / "config_mine.json"
    path.write_text(text_of(BASELINE))
    assert configuration.load(path).name == "mine"
    with pytest.raises(ValueError, match="no configuration is named 'mine': expected a path, or"):
        configuration.load("mine")
    for name in ("quick", "config_quick", "config_quick.json", "quick.json"):
        assert configuration.load(name).name == "quick"
    with pytest.raises(FileNotFoundError):
        configuration.load("config_mine.json")
    path.write_text(text_of(BASELINE, n_reps=0))
    with pytest.raises(ValueError, match=r"config_mine\.json: \$\.n_reps"):
        configuration.load(path)
