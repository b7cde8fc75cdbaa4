"""What a reward is, and how answers are judged: in this process, in one with limits, and file by file."""
