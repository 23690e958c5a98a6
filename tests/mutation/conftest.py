"""The targets of this folder find each other where they are copied to, and nowhere else."""

collect_ignore = ["planted.py", "planted_beside.py"]
