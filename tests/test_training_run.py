"""Whole training runs: records, resuming after a kill, stopping, outages, a sentence for every mistake."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llds.errors import LLDSError
from llds.report import read_record, run_page
from llds.training.environment import prepare_environment
from llds.training.progress import PlainDisplay
from llds.training.recipe import load_recipe
from llds.training.records import RunFolder, read_lines
from tiny_world import built_world, small_settings

prepare_environment()


@pytest.fixture(scope="module")
def world():
    return built_world()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLDS_CACHE", str(tmp_path / "cache"))


def recipe_for(world, runs, *overrides):
    return load_recipe("tiny", [*small_settings(world, world / "model", runs), *overrides])


def run_in_process(recipe, force=False):
    from llds.training.run import train

    said = io.StringIO()
    return train(recipe, PlainDisplay(said), force), said.getvalue()


def comparable(path):
    """The metrics without wall-clock time."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_lines(path)]


class StoppingDisplay(PlainDisplay):
    """Presses Ctrl-C twice, so to say, in the middle of an optimizer step."""

    def __init__(self, step):
        super().__init__(io.StringIO())
        self.stop_at = step

    def step(self, row):
        super().step(row)
        if row["step"] == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def straight(world, tmp_path_factory):
    """A run of five rollouts without interruption."""
    runs = tmp_path_factory.mktemp("straight")
    result, said = run_in_process(recipe_for(world, runs, "run.rollouts=5", "evaluation.every=2"))
    return result, said


def test_a_run_learns_and_leaves_its_records(straight):
    result, said = straight
    run = RunFolder(result.folder)
    assert result.finished
    assert result.exit_code == 0
    assert sorted(path.name for path in run.path.iterdir() if path.name != ".lock") == [
        "checkpoints",
        "config.yaml",
        "evaluations",
        "events.jsonl",
        "metrics.jsonl",
        "model",
        "result.json",
        "trajectories",
    ]
    rows = read_lines(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["rollout"] for row in rows] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for row in rows[::2]:
        assert {
            "reward",
            "exact_match",
            "searches",
            "valid_search_share",
            "entropy",
            "grad_norm",
        } <= row.keys()
        assert row["llds/structural_zero"] == 1
        assert row["llds/loss"] == 0
    assert any(row["llds/loss"] > 0 for row in rows[1::2])
    assert result.llds_steps["structural zero"] == 5
    assert result.llds_steps["active"] >= 1
    assert "step 1/10" in said
    assert "LLDS loss structural zero" in said
    assert "LLDS is live in 1 of 2 optimizer steps" in said
    events = read_lines(run.events)
    assert [event["event"] for event in events] == [
        "start",
        "llds",
        "preflight",
        "evaluation",
        "evaluation",
        "finish",
    ]
    assert events[2]["clean"]
    assert len(events[2]["checked"]) == 14


def test_every_metric_is_documented(straight):
    docs = Path(__file__).parents[1] / "docs"
    text = (docs / "training.md").read_text() + (docs / "dynamics.md").read_text()
    keys = {key for row in read_lines(straight[0].folder / "metrics.jsonl") for key in row}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []


def test_the_result_holds_before_after_and_memory(straight):
    from llds.training.run import format_result

    result, _ = straight
    assert {
        "before",
        "after",
        "before-without-retriever",
        "after-without-retriever",
    } <= result.evaluations.keys()
    content = json.loads((result.folder / "result.json").read_text())
    before, after = (
        content["evaluations"][name]["groups"]["all"]["exact_match"] for name in ("before", "after")
    )
    assert content["gain"]["all"]["exact_match"]["value"] == pytest.approx(after["value"] - before["value"])
    text = format_result(result)
    for part in (
        "before",
        "after",
        "one-hop",
        "two-hop",
        "search off",
        "searches",
        "constant guess",
        "llds ask",
    ):
        assert part in text


def test_the_page_tells_the_run(straight):
    page = run_page(read_record(straight[0].folder))
    assert "Finished after 10 optimizer steps." in page
    assert "The penalty was" in page
    assert "<h2>What it wrote</h2>" in page
    assert page.count("<svg") >= 9


def test_nothing_is_pickled(straight):
    names = {path.suffix for path in straight[0].folder.rglob("*") if path.is_file()}
    assert names <= {".json", ".jsonl", ".yaml", ".safetensors", ".jinja", ""}
    assert len(list((straight[0].folder / "checkpoints").iterdir())) == 2


def test_trajectories_tell_the_tokens_apart(straight):
    result, _ = straight
    rows = [
        row
        for step in range(1, 11)
        for row in read_lines(result.folder / f"trajectories/step-{step:06d}.jsonl")
    ]
    assert len(rows) == 40
    for row in rows:
        length = len(row["tokens"])
        assert length == len(row["logprobs"]) == len(row["old_logprobs"]) == len(row["response_mask"])
        assert [span["start"] for span in row["spans"][1:]] == [span["end"] for span in row["spans"][:-1]]
        for span in row["spans"]:
            written = span["kind"] in {"search", "answer", "malformed"}
            assert set(row["response_mask"][span["start"] : span["end"]]) == {int(written)}
            if written:
                part = slice(span["start"], span["end"])
                fell = sum(row["old_logprobs"][part]) - sum(row["logprobs"][part])
                assert span["displacement"] == pytest.approx(fell)
                assert span["gate_open"] == (row["advantage"] >= -1e-3 and fell > 0)
        assert (row["reward"] == 1.0) == (row["answer"] in row["golden_answers"])
    assert any(span["kind"] == "information" for row in rows for span in row["spans"])
    assert any(span.get("gate_open") for row in rows for span in row["spans"])


def test_the_model_folder_loads_and_remembers_its_recipe(straight):
    from llds.training.policy import load_policy, saved_recipe

    result, _ = straight
    recipe = saved_recipe(str(result.folder), ["evaluation.batch=3"])
    assert recipe.model.path == str(result.folder / "model")
    assert recipe.episode.max_action == 32
    assert recipe.evaluation.batch == 3
    policy = load_policy(recipe.model)
    assert policy.model.config.use_cache
    assert not policy.model.training


def start_in_subprocess(recipe_args, env):
    command = [sys.executable, "-c", "from llds.cli import main; main()", "train", *recipe_args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, metrics, step):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.stderr.read()}")
        time.sleep(0.01)
    pytest.fail("the run did not get there in time")


def test_a_killed_run_goes_on_with_the_same_numbers(world, straight, tmp_path):
    args = [*small_settings(world, world / "model", tmp_path), "run.rollouts=5", "evaluation.every=2"]
    # Checkpoints only every second rollout, so that the kill throws steps away.
    args += ["run.save_every=2"]
    run = RunFolder(tmp_path / "try")
    process = start_in_subprocess(args, os.environ | {"LLDS_CACHE": str(tmp_path / "cache")})
    wait_for_step(process, run.metrics, 6)
    process.kill()
    process.communicate()
    assert not run.result.exists()
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith("step-")]

    (run.checkpoints / ".step-000008.tmp").mkdir(exist_ok=True)

    result, said = run_in_process(load_recipe("tiny", args))
    assert "Going on with the run" in said
    assert not list(run.checkpoints.glob(".*"))
    assert result.finished
    assert comparable(run.metrics) == comparable(straight[0].folder / "metrics.jsonl")
    for name in ("before", "rollout-000002", "rollout-000004", "after", "after-without-retriever"):
        assert run.evaluation(name).read_text() == RunFolder(straight[0].folder).evaluation(name).read_text()
    for step in (5, 10):
        name = f"trajectories/step-{step:06d}.jsonl"
        assert (run.path / name).read_text() == (straight[0].folder / name).read_text()
    assert "resume" in [event["event"] for event in read_lines(run.events)]


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(world, straight, tmp_path):
    args = [
        *small_settings(world, world / "model", tmp_path),
        "run.rollouts=5",
        "evaluation.every=2",
        "run.save_every=0",
    ]
    run = RunFolder(tmp_path / "try")
    process = start_in_subprocess(args, os.environ | {"LLDS_CACHE": str(tmp_path / "cache")})
    wait_for_step(process, run.metrics, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Run the same command again to go on." in out
    assert "Stopping after this rollout" in err
    assert "Traceback" not in err
    steps = len(read_lines(run.metrics))
    assert 2 <= steps < 10
    assert steps % 2 == 0
    assert (run.checkpoints / f"step-{steps:06d}").is_dir()
    result, _ = run_in_process(load_recipe("tiny", args))
    assert result.finished
    assert comparable(run.metrics) == comparable(straight[0].folder / "metrics.jsonl")


def test_a_broken_checkpoint_is_one_sentence(world, tmp_path):
    from llds.training.run import train

    recipe = recipe_for(world, tmp_path, "evaluation.questions=2", "evaluation.without_retriever=false")
    train(recipe, StoppingDisplay(3))
    (checkpoint,) = (tmp_path / "try" / "checkpoints").iterdir()
    (checkpoint / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(LLDSError, match=r"step-000002 can't be read .*delete that checkpoint"):
        run_in_process(recipe)


NOTE_WHO_WARM_STARTS = """
import os
from pathlib import Path

import llds.training.warm as warm
from llds.cli import main

train = warm.warm_start

def noted(*arguments, **options):
    Path(__file__).with_name("warm-" + os.environ["RANK"]).touch()
    train(*arguments, **options)

warm.warm_start = noted
main()
"""


def test_two_processes_train_one_run(world, tmp_path):
    script = write(tmp_path / "train.py", NOTE_WHO_WARM_STARTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", script, "train"]
    command += [*small_settings(world, world / "model", tmp_path), "run.rollouts=2", "warm_start.steps=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "LLDS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_lines(tmp_path / "try" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["llds/structural_zero"] == 1
    assert done.stdout.count("gain in points") == 1
    assert json.loads((tmp_path / "try" / "result.json").read_text())["finished"]
    assert [path.name for path in tmp_path.glob("warm-*")] == ["warm-0"]
    (folder,) = (tmp_path / "cache" / "warm").iterdir()
    assert (folder / "model.safetensors").is_file()


def test_a_finished_run_is_shown_not_repeated(world, straight, tmp_path):
    recipe = recipe_for(
        world, straight[0].folder.parent, "run.rollouts=5", "evaluation.every=2", "run.keep=1"
    )
    before = (straight[0].folder / "metrics.jsonl").stat().st_mtime_ns
    result, said = run_in_process(recipe)
    assert "is finished" in said
    assert result.to_json() == straight[0].to_json()
    assert (straight[0].folder / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_run_of_another_recipe_is_left_alone(world, straight):
    recipe = recipe_for(
        world, straight[0].folder.parent, "run.rollouts=5", "evaluation.every=2", "llds.coef=0.1"
    )
    with pytest.raises(LLDSError, match=r"llds.coef is 0.2 there and 0.1 here.*choose another run.name"):
        run_in_process(recipe)


def test_a_folder_that_is_no_run_is_left_alone(world, tmp_path):
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "thesis.tex").write_text("x")
    with pytest.raises(LLDSError, match="is not a run folder"):
        run_in_process(recipe_for(world, tmp_path))
    assert [path.name for path in (tmp_path / "try").iterdir() if path.name != ".lock"] == ["thesis.tex"]


def test_a_structural_zero_is_said_before_the_first_step(world, tmp_path):
    recipe = recipe_for(
        world, tmp_path, "grpo.steps_per_rollout=1", "run.rollouts=1", "evaluation.questions=2"
    )
    with pytest.raises(LLDSError, match=r"found L1: .*STRUCTURAL ZERO.*Pass --force to train anyway"):
        run_in_process(recipe)
    assert not (tmp_path / "try" / "metrics.jsonl").exists()
    result, said = run_in_process(recipe, force=True)
    assert "STRUCTURAL ZERO" in said
    assert said.index("STRUCTURAL ZERO") < said.index("step 1/1")
    assert result.llds_steps == {"active": 0, "measured zero": 0, "structural zero": 1, "off": 0}
    event = next(event for event in read_lines(result.folder / "events.jsonl") if event["event"] == "llds")
    assert event["status"] == "structural_zero"


@pytest.mark.parametrize(
    "overrides",
    [
        ("grpo.loss=grpo", "grpo.importance=sequence", "llds.mask_answer=true", "llds.gate=response"),
        (
            "grpo.beta=0.01",
            "llds.baseline=reference",
            "grpo.passes=2",
            "grpo.schedule=cosine",
            "grpo.warmup=0.5",
        ),
        ("llds.baseline=anchor", "llds.anchor_every=2", "llds.penalty=huber", "reward.f1=0.5"),
        ("model.dtype=bfloat16", "llds.coef=0", "model.gradient_checkpointing=true", "run.trajectories=0"),
    ],
)
def test_other_settings_reach_the_trainer(world, tmp_path, overrides):
    recipe = recipe_for(world, tmp_path, "run.rollouts=2", "evaluation.questions=2", *overrides)
    result, _ = run_in_process(recipe)
    assert result.finished
    assert all(isinstance(row["loss"], float) for row in read_lines(result.folder / "metrics.jsonl"))


def test_an_anchor_survives_stopping_at_once(world, tmp_path):
    from llds.training.run import format_result, train

    overrides = ("llds.baseline=anchor", "llds.anchor_every=3", "run.rollouts=3", "evaluation.questions=2")
    whole, _ = run_in_process(recipe_for(world, tmp_path / "a", *overrides))
    recipe = recipe_for(world, tmp_path / "b", *overrides)
    stopped = train(recipe, StoppingDisplay(5))
    assert not stopped.finished
    assert stopped.exit_code == 130
    assert "Run the same command again" in format_result(stopped)
    resumed, _ = run_in_process(recipe)
    assert comparable(resumed.folder / "metrics.jsonl") == comparable(whole.folder / "metrics.jsonl")


class Server(BaseHTTPRequestHandler):
    """Search-R1's protocol over one passage; out of order while ``broken``."""

    broken = False
    failures_to_come = 0

    def do_POST(self):
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        if self.broken or self.failures_to_come:
            type(self).failures_to_come = max(0, self.failures_to_come - 1)
            self.send_error(503)
            return
        document = {"id": "1", "contents": '"Arven"\nArven currency: the ducat.'}
        body = json.dumps({"result": [[{"document": document, "score": 1.0}] for _ in queries]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("OneServer", (Server,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}/retrieve"
        http.shutdown()


def test_an_outage_stops_the_run_at_a_point_to_go_on_from(world, tmp_path, server):
    handler, url = server
    settings = (f"retrieval.url={url}", "retrieval.tries=1", "run.rollouts=3", "evaluation.questions=2")
    settings += ("retrieval.cache=0",)
    settings += ("evaluation.without_retriever=false", "run.save_every=0")
    recipe = recipe_for(world, tmp_path, *settings)
    run = RunFolder(tmp_path / "try")

    def break_down():
        while not run.metrics.exists():
            time.sleep(0.001)
        handler.broken = True

    threading.Thread(target=break_down, daemon=True).start()
    with pytest.raises(LLDSError, match="search tool failed in every episode"):
        run_in_process(recipe)
    assert read_lines(run.events)[-1]["event"] == "failed"
    steps = len(read_lines(run.metrics))
    assert (run.checkpoints / f"step-{steps:06d}").is_dir()
    handler.broken = False
    result, _ = run_in_process(recipe)
    assert result.finished
    assert result.steps == 6


def test_episodes_whose_tool_failed_are_left_out_and_counted(world, tmp_path, server):
    handler, url = server
    settings = (f"retrieval.url={url}", "retrieval.tries=1", "run.rollouts=3", "evaluation.questions=2")
    settings += ("retrieval.cache=0",)
    settings += ("evaluation.without_retriever=false", "sampling.batch=4")
    run = RunFolder(tmp_path / "try")

    def fail_once():
        while not run.metrics.exists():
            time.sleep(0.001)
        handler.failures_to_come = 1

    threading.Thread(target=fail_once, daemon=True).start()
    result, said = run_in_process(recipe_for(world, tmp_path, *settings))
    assert result.finished
    (event,) = [event for event in read_lines(run.events) if event["event"] == "tool_failed"]
    assert 1 <= event["episodes"] <= 4
    told = [event for event in read_lines(run.events) if event["event"].startswith("retriever_")]
    assert [event["event"] for event in told] == [
        "retriever_failing",
        "retriever_unavailable",
        "retriever_recovered",
    ]
    assert told[1]["url"] == url
    assert f"The search tool failed in {event['episodes']} episodes" in said
    row = read_lines(run.metrics)[event["step"] - 1]
    assert row["tool/failed_episodes"] == event["episodes"]
    assert math.isfinite(row["loss"])


def test_a_retriever_that_is_down_is_one_sentence(world, tmp_path, server):
    handler, url = server
    handler.broken = True
    quick = ("run.rollouts=1", "evaluation.without_retriever=false")
    recipe = recipe_for(world, tmp_path, f"retrieval.url={url}", "retrieval.tries=1", *quick)
    with pytest.raises(LLDSError, match="check that it runs"):
        run_in_process(recipe)
    # Nothing was done yet, so the mistake may be mended in the same folder.
    result, said = run_in_process(recipe_for(world, tmp_path, *quick))
    assert result.finished
    assert "Going on" not in said
    events = [event["event"] for event in read_lines(result.folder / "events.jsonl")]
    assert "retriever_failing" in events
    assert [name for name in events if not name.startswith("retriever_")][:2] == ["start", "start"]


@pytest.mark.parametrize("rate", ["1e30", "1e300"])
def test_lost_weights_stop_the_run_before_they_are_kept(world, tmp_path, rate):
    recipe = recipe_for(world, tmp_path, f"grpo.learning_rate={rate}", "evaluation.without_retriever=false")
    with pytest.raises(LLDSError, match=r"NaN or infinite in optimizer step \d.*Lower grpo.learning_rate"):
        run_in_process(recipe)
    run = RunFolder(tmp_path / "try")
    assert read_lines(run.events)[-1]["event"] == "failed"
    assert not run.checkpoints.exists()
    assert not run.model.exists()


def test_a_model_of_nan_is_one_sentence(world, tmp_path):
    def change(model, tokenizer):
        model.model.norm.weight.data[3] = float("nan")

    folder = broken_model(world, tmp_path / "model", change)
    with pytest.raises(LLDSError, match=r"NaN or infinities \(in model.norm.weight\)"):
        run_in_process(recipe_for(world, tmp_path, f"model.path={folder}"))


def test_without_a_penalty_llds_is_off_and_not_zero(world, tmp_path):
    from llds.training.run import format_result

    settings = ("llds.coef=0", "run.rollouts=1", "evaluation.without_retriever=false")
    result, said = run_in_process(recipe_for(world, tmp_path, *settings))
    assert result.llds_steps == {"active": 0, "measured zero": 0, "structural zero": 0, "off": 2}
    assert "LLDS penalty off in 2." in format_result(result)
    assert said.count("LLDS loss off") == 2


def broken_model(world, folder, change):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(world / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(world / "model")
    change(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_without_pad_token_uses_its_end_token_and_says_so(world, tmp_path):
    def change(model, tokenizer):
        tokenizer.pad_token = None

    folder = broken_model(world, tmp_path / "model", change)
    result, said = run_in_process(
        recipe_for(world, tmp_path, f"model.path={folder}", "run.rollouts=1", "evaluation.questions=2")
    )
    assert result.finished
    assert "has no pad token; <|end|> pads in its place" in said


def test_a_model_with_neither_pad_nor_end_token_is_one_sentence(world, tmp_path):
    def change(model, tokenizer):
        tokenizer.pad_token = None
        tokenizer.eos_token = None

    folder = broken_model(world, tmp_path / "model", change)
    with pytest.raises(LLDSError, match="neither a pad nor an end-of-text token"):
        run_in_process(recipe_for(world, tmp_path, f"model.path={folder}"))


def test_a_tokenizer_of_another_model_is_one_sentence(world, tmp_path):
    folder = broken_model(
        world, tmp_path / "model", lambda model, tokenizer: tokenizer.add_tokens(["<more>"] * 1)
    )
    with pytest.raises(LLDSError, match="do not belong together"):
        run_in_process(recipe_for(world, tmp_path, f"model.path={folder}"))


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("setting", "make", "expected"),
    [
        ("retrieval.corpus", lambda tmp: tmp / "none.jsonl", "no corpus file .*none.jsonl"),
        ("retrieval.corpus", lambda tmp: write(tmp / "bad.jsonl", '{"id": "1"}\n'), "bad.jsonl:1.*contents"),
        ("data.train", lambda tmp: tmp / "none.jsonl", "none.jsonl can't be read"),
        (
            "data.train",
            lambda tmp: write(tmp / "q.jsonl", '{"id": "1", "question": "Q?"}\n'),
            "q.jsonl:1.*golden",
        ),
        ("data.test", lambda tmp: write(tmp / "q.jsonl", "{oops\n"), "q.jsonl:1.*JSON"),
        ("model.path", lambda tmp: tmp / "absent", "no model folder"),
        ("model.path", lambda tmp: tmp, "not a model folder: there is no config.json"),
        ("model.path", lambda tmp: "someone/some-model", "not on this machine; set HF_HUB_OFFLINE=0"),
        ("episode.max_prompt", lambda tmp: 5, "more than episode.max_prompt = 5"),
        ("episode.max_response", lambda tmp: 2000, "exceed the model's 512 positions"),
        ("grpo.questions", lambda tmp: 64, "12 training questions, fewer than one rollout"),
        ("run.seed", lambda tmp: 2**32, "at most"),
        ("run.threads", lambda tmp: 10**6, "at most 1024"),
        ("data.test", lambda tmp: "", "'data.test=' is empty"),
        ("run.report_to", lambda tmp: "wanbd", "did you mean 'wandb'"),
        ("run.report_to", lambda tmp: "comet_ml", "comet_ml, which is not installed"),
        ("warm_start.steps", lambda tmp: 1, "none; set warm_start.steps=0"),
    ],
)
def test_a_wrong_input_is_one_sentence(world, tmp_path, setting, make, expected):
    overrides = [f"{setting}={make(tmp_path)}"]
    if setting == "warm_start.steps":
        row = '{"id": "1", "question": "Q?", "golden_answers": ["a"]}\n'
        overrides += [f"data.train={write(tmp_path / 'plain.jsonl', row)}", "grpo.questions=1"]
    with pytest.raises(LLDSError, match=expected) as error:
        run_in_process(recipe_for(world, tmp_path / "runs", *overrides))
    assert "\n" not in str(error.value)


def test_a_model_without_safetensors_is_one_sentence(world, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (world / "model").iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(LLDSError, match="holds no safetensors weights"):
        run_in_process(recipe_for(world, tmp_path, f"model.path={folder}"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Missing weights would be random numbers.
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, r"model.layers.2.* is missing"),
        ({"model_type": "bert"}, r"bert\..* is missing"),
        ({"hidden_size": 128}, "have other shapes than its config.json says"),
    ],
)
def test_weights_of_another_config_are_one_sentence(world, tmp_path, changes, expected):
    from llds.training.policy import load_policy
    from llds.training.recipe import ModelSettings

    shutil.copytree(world / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(LLDSError, match=expected) as error:
        load_policy(ModelSettings(path=str(tmp_path / "model")))
    assert "\n" not in str(error.value)


def test_a_model_that_the_hub_did_not_give_is_another_sentence(monkeypatch):
    from llds.training import policy

    told = OSError("We couldn't connect")
    assert "set HF_HUB_OFFLINE=0" in policy._why_not("some/one", told)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert "did not come from the Hub; check its name" in policy._why_not("some/one", told)


def test_weights_that_a_model_has_no_place_for_are_told(world, tmp_path):
    from llds.training.policy import load_policy
    from llds.training.recipe import ModelSettings

    assert load_policy(ModelSettings(path=str(world / "model"))).notes == ()
    shutil.copytree(world / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | one))
    (note,) = load_policy(ModelSettings(path=str(tmp_path / "model"))).notes
    assert "have no place in the model, such as model.layers.1." in note


def test_a_warm_start_is_done_once(world, tmp_path):
    overrides = (
        "warm_start.steps=3",
        "run.rollouts=1",
        "evaluation.questions=2",
        "evaluation.without_retriever=false",
    )
    first, _ = run_in_process(recipe_for(world, tmp_path / "a", *overrides))
    (weights,) = (Path(os.environ["LLDS_CACHE"]) / "warm").glob("*/model.safetensors")
    made = weights.stat().st_mtime_ns
    again, _ = run_in_process(recipe_for(world, tmp_path / "b", *overrides))
    assert len(list((Path(os.environ["LLDS_CACHE"]) / "warm").iterdir())) == 1
    assert weights.stat().st_mtime_ns == made
    assert weights.read_bytes() != (world / "model" / "model.safetensors").read_bytes()
    assert comparable(first.folder / "metrics.jsonl") == comparable(again.folder / "metrics.jsonl")


def test_the_shipped_model_learns_from_the_shipped_data(tmp_path):
    overrides = ["run.rollouts=1", "grpo.questions=4", "grpo.steps_per_rollout=2", "evaluation.questions=12"]
    recipe = load_recipe("tiny", [*overrides, "run.threads=1", f"run.folder={tmp_path}"])
    result, _ = run_in_process(recipe)
    assert result.finished
    before, without = (result.evaluations[name] for name in ("before", "before-without-retriever"))
    assert before.groups["all"].exact_match.value > 0.1
    assert before.groups["all"].searches > 0.5
    assert before.valid_search_share == 1.0
    assert without.groups["all"].exact_match.value < 0.1
    rows = read_lines(result.folder / "metrics.jsonl")
    assert rows[0]["searches"] > 0.5
    assert rows[1]["llds/structural_zero"] == 0
