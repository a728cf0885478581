"""Speed of every family beside yardsticks of the same run."""
