"""Pipeline parallelism by torch's schedules, with coded stage boundaries."""
