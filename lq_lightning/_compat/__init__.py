"""Every private name of torch and lightning, and every version gate, in one package.

Nothing outside of it may use a name with a leading underscore of torch or lightning. `fsdp2` has
FSDP2's parameter groups as collectives see them, `modules` sharded modules, `gradients` those that
FSDP2 keeps unreduced, `torch` the rest of torch, `tensors` sharded and many small tensors,
`lightning` the Trainer.
"""
