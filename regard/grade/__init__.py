"""Grading students' functions and classes against references, known mistakes ("slips"), properties and laws.

On the command line this is `regard grade SPEC FILE|NOTEBOOK|FOLDER`. A spec is a TOML file that describes an exercise;
`exercises/` has the Python of those that come with regard: cases, references, slips and properties.
"""

from regard.grade.advice import SubmissionError
from regard.grade.cases import Draw, GradeCase, causal_mask
from regard.grade.grading import Grader, grade, grade_objects
from regard.grade.judging import broken_law
from regard.grade.outcomes import Grade, ItemOutcome
from regard.grade.spec import Spec, SpecError, load_spec, shipped_specs

__all__ = [
    "Draw",
    "Grade",
    "GradeCase",
    "Grader",
    "ItemOutcome",
    "Spec",
    "SpecError",
    "SubmissionError",
    "broken_law",
    "causal_mask",
    "grade",
    "grade_objects",
    "load_spec",
    "shipped_specs",
]
