"""The README's figures: which command makes each, and what it has found."""
