"""Side by side with peers, in one run, as ratios; figures go to results/."""
