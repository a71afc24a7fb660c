"""Logs of every shape, written by the real writers where there are any, for the tests of the readers."""

import csv
import gzip
import io
import json
import struct
from pathlib import Path

from llds.diagnosis.formats.events import masked_crc

LOGS = Path(__file__).parent / "fixtures" / "logs"


def rows(count=30):
    """Steps of a run: keys as verl has them."""
    return [
        {
            "critic/score/mean": 0.2 + 0.01 * step,
            "actor/entropy": 0.5 - 0.005 * step,
            "actor/grad_norm": 0.7 + 0.001 * (step % 5),
            "num_turns/mean": 4.0 + 0.1 * (step % 3),
            "response_length/mean": 900.0 + step,
            "actor/ppo_kl": 1e-4 * (step % 7 - 3),
            "actor/pg_clipfrac": 0.002,
        }
        for step in range(1, count + 1)
    ]


def verl_line(step, row, form="{!r}"):
    return f"step:{step} - " + " - ".join(f"{key}:{form.format(value)}" for key, value in row.items())


def verl_console(count=30, form="np.float64({!r})"):
    lines = ["Training from scratch", "len reward_extra_infos_dict['reward']: 1800"]
    for step, row in enumerate(rows(count), start=1):
        lines += [f"Training Progress:   0%|          | {step}/500 [1:13:46<3730:21:17, 239.93s/it]"]
        lines += [verl_line(step, row, form), "  Answer: 2"]
    return ("\n".join(lines) + "\n").encode()


def ray_console(count=30):
    lines = [
        f"\x1b[36m(TaskRunner pid=123)\x1b[0m {verl_line(s, r)}" for s, r in enumerate(rows(count), start=1)
    ]
    return ("\n".join(lines) + "\n").encode()


def jsonl(count=30):
    return "".join(json.dumps({"step": s, **r}) + "\n" for s, r in enumerate(rows(count), start=1)).encode()


def csv_table(count=30):
    out = io.StringIO()
    writer = csv.writer(out)
    names = list(rows(1)[0])
    writer.writerow(["step", *names])
    for step, row in enumerate(rows(count), start=1):
        writer.writerow([step, *(repr(row[name]) for name in names)])
    return out.getvalue().encode()


def wandb_csv(count=30):
    """W&B's export: the run's name before each key, and bounds beside it."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    names = list(rows(1)[0])
    heads = [f"my-run - {name}{end}" for name in names for end in ("", "__MIN", "__MAX")]
    writer.writerow(["Step", *heads])
    for step, row in enumerate(rows(count), start=1):
        writer.writerow([step, *(repr(row[name]) for name in names for _ in range(3))])
    return out.getvalue().encode()


def trl_row(step):
    return {"loss": 0.01, "grad_norm": 0.5 + 0.01 * (step % 4), "reward": 0.1 * (step % 5), "kl": 0.001 * step,
            "completion_length": 150.0 + step, "clip_ratio": 0.0, "epoch": 0.1}  # fmt: skip


def trl_console(count=30):
    lines = []
    for step in range(1, count + 1):
        bar = f"{step:3}%|▏         | {step}/250 [00:10<01:00,  1.2s/it]"
        texts = {key: str(value) for key, value in trl_row(step).items()} if step % 2 else trl_row(step)
        lines.append(f"{bar}\r{bar}{texts!r}\n")
    return "".join(lines).encode()


def trainer_state(count=30):
    history = [{"step": step, **trl_row(step)} for step in range(1, count + 1)]
    return json.dumps({"best_metric": None, "global_step": count, "log_history": history}, indent=2).encode()


def swift_jsonl(count=30):
    lines = [
        json.dumps({**trl_row(s), "global_step/max_steps": f"{s}/{count}", "train_speed(iter/s)": 0.1}) + "\n"
        for s in range(1, count + 1)
    ]
    return "".join(lines).encode()


def _record(data):
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def events(count=30):
    """A TensorBoard file, made by hand after the definition of its records."""

    def varint(number):
        parts = bytearray()
        while True:
            parts.append((number & 0x7F) | (0x80 if number > 0x7F else 0))
            number >>= 7
            if not number:
                return bytes(parts)

    def text(field, content):
        return bytes([field << 3 | 2]) + varint(len(content)) + content

    out = _record(text(3, b"brain.Event:2"))
    for step in range(1, count + 1):
        for key, value in {f"train/{k}": v for k, v in trl_row(step).items()}.items():
            summary = text(1, text(1, key.encode()) + bytes([0x15]) + struct.pack("<f", value))
            out += _record(
                bytes([0x09]) + struct.pack("<d", 1.0) + bytes([0x10]) + varint(step) + text(5, summary)
            )
    return out


SHAPES = {
    "console": verl_console(),
    "ray": ray_console(),
    "jsonl": jsonl(),
    "csv": csv_table(),
    "wandb csv": wandb_csv(),
    "trl console": trl_console(),
    "trainer state": trainer_state(),
    "ms-swift": swift_jsonl(),
    "tensorboard": events(),
    "gzip": gzip.compress(verl_console()),
}
