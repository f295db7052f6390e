"""Analysing heads: scores and labels, ablation, redundancy, syntax and coreference."""
