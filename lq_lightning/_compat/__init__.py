"""Every private name of torch and lightning, and every version gate, in one package.

Nothing outside of it may use a name with a leading underscore of torch or lightning. `fsdp2` has
FSDP2's parameter groups and passes, `modules` sharded modules, `saved_tensors` autograd, `torch`
the rest of torch, `tensors` sharded tensors, `lightning` the Trainer.
"""
