"""The settings that mean the same in every trainer: `from groundup.train.settings import *`, then the trainer's own.

A trainer that needs another default assigns the key again. `--help` lists these under a heading of their own.
"""

# Removed settings, with the value that switched each off. A config.py or checkpoint with this value is still read;
# any other value is refused (configurator.py) or reported (run.py).
REMOVED = {
    "ddp_debug": False, "compile_whole": False, "domain": "", "stable_lr": 0.0, "kl_target": 0.0, "kl_horizon": 10000.0,
    "loss": "last", "end": "min", "competence": 1.0, "competence_steps": 0, "competence_schedule": "sqrt",
    "kl": "rho_k3", "stop_on": "", "reference_file": "", "nll_prompt": False,
}  # fmt: skip

resume = "auto"  # auto = continue if out_dir has a checkpoint | must = only continue | never = refuse a used out_dir
overwrite = False  # with resume='never': delete what out_dir holds
seed = 1337  # new weights, data order, dropout, samples
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names: 'embed,lm_head,lora'
lora_rank = 16  # rank of the LoRA matrices
lora_alpha = 32.0  # an adapter's output is multiplied by lora_alpha / lora_rank
base_dtype = "auto"  # of frozen weights beside adapters: float32 | bfloat16 | auto = bfloat16 where dtype is that
lora_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # matrices that get an adapter
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
min_lr = 0.0  # learning rate at the end of the schedule
schedule = "cosine"  # constant | cosine | linear | wsd (see groundup/train/optim.py)
warmup_steps = 0  # steps of rising learning rate; 0 = warmup_fraction of max_steps
warmup_fraction = 0.03  # share of max_steps, where warmup_steps is 0
decay_steps = 0  # step at which min_lr is reached; 0 = max_steps; shorter holds min_lr, longer ends above it
decay_fraction = 0.2  # wsd: share of the schedule that the final decay takes
weight_decay = 0.0  # on matrices only
beta1 = 0.9  # AdamW: decay of the mean of gradients
beta2 = 0.95  # AdamW: decay of the mean of squared gradients
momentum = 0.95  # Muon: decay of the mean of gradients
grad_clip = 1.0  # global norm; 0.0 = off
max_skipped = 20  # stop after this many updates in a row without a finite gradient (checked every log_every steps)
# system
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block: as fast as one graph, and starts three times sooner
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more compute
parallel = "ddp"  # ddp | fsdp: each rank keeps a part of the weights, gradients and state (pretrain, sft, dpo)
bucket_mb = 0.0  # size of the gradient buckets; 0 = from the model's size
compress = "none"  # gradients on the wire: none | fp16 | bf16 | powersgd (low rank, with error feedback)
compress_rank = 4  # powersgd: rank of the approximation
compress_start_step = -1  # powersgd: send the first so many steps uncompressed; -1 = the warm-up
compress_embedding = False  # powersgd: the embedding and the head too: fewer bytes, higher loss (docs/ddp.md)
overlap_step = "off"  # update each block: forward = just before its next use | backward = once its gradient arrived
zero1 = False  # each rank keeps and updates its share of the optimizer state (ZeRO-1)
timeout_s = 300.0  # stop if the ranks wait for each other longer than this many seconds
peak_tflops = 0.0  # of one device, for mfu and the plan; 0 = from its data sheet, or measured
device_gib = 0.0  # memory of one device, for the plan's least way that fits; 0 = what this machine has
plan_only = False  # print the plan and stop; WORLD_SIZE=8 before the command plans for 8 devices
# evaluation, log, checkpoints
eval_every = 100  # steps; also before the first and after the last step
log_every = 10  # steps
tensorboard = False  # also write event files for tensorboard into out_dir
save_every = 500  # steps; also after the last step
async_save = True  # write in a thread, from a copy of weights and optimizer state in RAM (with a GPU up to two copies)
keep_last = 2  # newest checkpoints kept; 0 = all
keep_best = 2  # also keep this many best checkpoints (0 to 2), by validation loss; needs saves at evaluations
