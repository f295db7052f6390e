"""What heads do: labels, scores, ablation, redundancy, syntax and coreference."""
