"""Pipeline parallelism on ``torch.distributed.pipelining`` with coded stage boundaries."""
