"""What does every training run share?

In: the settings of a trainer and a run directory. Out: a model that trains, and checkpoints that resume exactly.
Read settings, then run (start, set-up, end) with out_dir, base, device, log and signals; checkpoint, huggingface,
write_behind; computation and skeleton (what an edited model.py changes); optim, lora, plan; cpu_attention, which
model.py calls; fsdp beside ddp.py, ranks and powersgd below it.
"""
