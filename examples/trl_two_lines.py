"""LLDS in an ordinary TRL script: two lines, marked below. Runs on a CPU in seconds, without the network.

    pip install "llds[trl]"
    python examples/trl_two_lines.py

The model is a tiny random one, made on the spot; put your own model, data and reward in its place. The reward
counts vowels and has nothing to do with search: LLDS needs only what GRPO has anyway.
"""

import argparse
import string
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from llds.engines.trl import attach_llds  # line 1


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A random language model of two small layers."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **shape, **heads))


def vowels(completions: list[str], **kwargs: object) -> list[float]:
    """Reward: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def main() -> None:
    """Train a few steps and print what LLDS did in each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    steps = parser.parse_args().steps

    tokenizer = letters()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=8,
            # Four optimizer steps per rollout: in all but the first, old and new policy differ.
            steps_per_generation=4,
            max_completion_length=12,
            learning_rate=3e-3,
            max_steps=steps,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=tiny_model(tokenizer),
            reward_funcs=vowels,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(string.ascii_lowercase)}),
            processing_class=tokenizer,
        )
        attach_llds(trainer, coef=0.2)  # line 2
        trainer.train()

    for entry in trainer.state.log_history:
        if "llds/loss" in entry:
            why = "zero by construction" if entry["llds/structural_zero"] else "live"
            print(f"step {entry['step']}: LLDS {entry['llds/loss']:.6f}, {why}")


if __name__ == "__main__":
    main()
