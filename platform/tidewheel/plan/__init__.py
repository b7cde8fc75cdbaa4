"""What a run would cost before it is started."""
