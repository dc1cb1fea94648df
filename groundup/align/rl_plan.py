"""What a run of rl.py will take at most: the memory of all its models, and the time of its updates."""

import torch

from groundup.align.rewards import Rewards
from groundup.generate.engine import cache_bytes
from groundup.train import plan as memory_plan
from groundup.train.base import adapters_of
from groundup.train.lora import trainable_table
from groundup.train.plan import flops_per_token, parameter_table
from model import ModelConfig


def rows_at_a_time(config: dict, world_size: int) -> int:
    """Return how many answers a rank draws together: draw_batch_size, but no more than its answers of a step."""
    most = config["prompts_per_step"] * config["group_size"] // world_size
    return min(config["draw_batch_size"] or most, most)


def plan(
    cfg: ModelConfig, config: dict, world_size: int, device: torch.device, dtype: torch.dtype, peak: float,
    rewards: Rewards,
) -> str:  # fmt: skip
    """Return what this run will take at most, as text: parameters, steps, memory by part, time of the updates."""
    trained, total = trainable_table(cfg, config["trainable"], adapters_of(config)), parameter_table(cfg)["total"]
    cache = cache_bytes(cfg, rows_at_a_time(config, world_size), config["block_size"], dtype)
    other = {
        "reference": 4.0 * total * (config["reference"] == "model"), "reward models": 4.0 * rewards.n_parameters,
        "cache": float(cache), "copy to draw with": float(dtype.itemsize * total),  # see generate.for_inference
    }  # fmt: skip
    if config["algorithm"] == "ppo":
        other |= {"critic": 4.0 * total + 12.0 * trained["trainable"]}
        copied = config["async_save"] and device.type == "cpu"
        other |= {"critic's copy to save from": 12.0 * trained["trainable"]} if copied else {}
    memory = memory_plan.memory_parts(cfg, config, trained, False, world_size, device, dtype, other)
    n_prompts, n_steps, T = config["prompts_per_step"], config["max_steps"], config["block_size"]
    n_updates = config["epochs_per_step"] * config["minibatches"]
    batch = f"{n_prompts} prompts x {config['group_size']} answers per step, {n_updates} updates, {n_steps:,} steps"
    flops = n_prompts * config["group_size"] * n_steps * T * config["epochs_per_step"] * flops_per_token(cfg, T)
    note = "of the updates below "
    return memory_plan.describe(trained, config["trainable"], batch, memory, flops, world_size, peak, note)
