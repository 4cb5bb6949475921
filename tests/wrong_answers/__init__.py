"""Wrong answers, by lab, that a looser check would accept."""
