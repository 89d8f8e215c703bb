"""From settings to results: one run, or a comparison of many."""
