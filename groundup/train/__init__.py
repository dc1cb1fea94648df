"""What does every training run share?

In: the settings of a trainer, its model and a run directory. Out: a model that trains, and
checkpoints that resume exactly. In the order in which a trainer uses them:

    ranks, device          the processes, the GPU or CPU, random numbers
    huggingface            model directories; config_json is their architecture
    start                  the checkpoint, tokenizer and architecture that a tuning run begins with
    lora                   which parameters are trained, adapters
    plan                   parameters, FLOPs, memory and time before anything is trained; a check
                           of the device
    powersgd, optim, fsdp  beside ddp.py: compressed gradients, update rules, sharded models
    checkpoint             find, restore and save
    log                    a line for people, an event for programs, the run's README.md
"""
