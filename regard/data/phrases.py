"""The words of an invented world: parts of names and places, occupations, and sentences that state one fact each.

In sentences, {name} stands for the person, {place} for a birthplace or home, {job} for an occupation and {a_job} for
the same with its article, {date} and {year} for those of the birth, {died} for the year of the death.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


WOMEN = _words(
    """Ada Alma Amira Anneke Aurora Beatrix Bettina Brida Carla Celeste Clara Dalia Delphine Doris Edda Elena
    Elodie Emilia Esther Fabia Fiona Flora Freda Gemma Gilda Greta Hanna Hedda Helena Ida Imani Ines Irma Isolde
    Jana Joan Judith Juno Karin Kezia Lara Leila Leonie Lidia Livia Lotte Lucia Mabel Magda Maren Marta Mina Mirela
    Nadia Nella Nora Odile Olga Oriana Paula Petra Philippa Rahel Renata Rhoda Romy Rosa Ruth Sabine Salome Selma
    Silvia Sonja Stella Tamsin Thea Tilda Ursula Vera Viola Wilma Xenia Yara Yvette Zelda Zora"""
)

MEN = _words(
    """Adam Albin Alec Anders Anton Arvid Axel Basil Bernard Boris Bruno Caspar Cedric Clement Conrad Cyril Damian
    Dario Denis Edgar Edwin Emil Enzo Erik Fabian Felix Florian Frank Gaspar Gerard Gideon Gustav Hamid Harald
    Hector Henrik Hugo Ivan Jakob Jasper Joachim Jonas Julian Karim Kasimir Konrad Lambert Leander Leo Linus Lorenz
    Lucas Magnus Malik Marius Martin Matteo Milan Moritz Nestor Nils Noel Octavio Olaf Orson Oskar Otto Pascal
    Peter Quentin Rafael Ramon Reuben Robin Roland Rufus Samuel Silas Simon Stefan Tarik Theo Tobias Tristan Ulrich
    Valentin Victor Walter Yusuf Zeno"""
)

# Family names, like places, have a beginning, a middle and an end; their parts differ, so that no name tells a place.
FAMILY = (
    _words(
        "Bar Bel Bran Cal Cor Dal Dor Fal Far Gal Gor Hal Har Hol Kel Kor Lan Lor Mal Mar Mor Nor Pel Per Ral Ros "
        "Sal Sel Tar Tol Ul Var Vol Wal Wil"
    ),
    _words("a e i o ba de di do ga le lo ma ne ni ro ta te vi"),
    _words("beck cott croft dale den ford gan ham ker lock man mont nen nick rick ser son stein ter ton vard well win"),
)
FOREIGN_FAMILY = (
    _words("Bjø Brå Çel Džu Eğri Fjæ Ghé Gjö Hrú Jär Kjæ Łuk Mbo Ngu Ñan Ødé Özd Pšen Qua Rzę Šim Tłó Þór Ügü Xhe Žab"),
    _words("a e é i o ö u ü bê dá gó ka lí mu né"),
    _words("dóttir ğlu gård ić järvi kwe lçı mbé ński ogo rûn šek sson tché vølg wicz xha ýr zadé"),
)
FOREIGN_WOMEN = _words(
    "Aðal Ayşe Béa Chiọma Dúna Elçin Frøya Gülü Hělena Ikù Jóra Kaïa Liên Māra Nkém Ørna Šárka Þóra Ždena"
)
FOREIGN_MEN = _words(
    "Ásgeir Boško Cão Çetin Dũng Émeka Ğani Håkon Ikẹ Jürgi Křen Łazar Mbéki Ñato Øyvin Rémi Søren Þráin"
)
PARTICLES = ("de", "del", "di", "la", "van", "van der", "von", "zu")

PLACE = (
    _words(
        "Ab Ash Bry Cin Cle Cra Dru Eld Fen Gle Gri Ilm Jun Kes Kry Lis Lum Myr Nim Oak Ost Pra Qui Rhe Sen Ske Tem "
        "Thi Umb Vey Wyn Yar Zin"
    ),
    _words("a e i o u ae an ar el en er ia il in ol on or ul"),
    _words(
        "bridge bury dell fall field gate grad haven holm hurst isk lin mere mouth nes polis port shire stad stow vale "
        "ville wick worth"
    ),
)
BEFORE_PLACE = _words("East Fort Great Little Mount New North Old Port Saint South Upper West")
STEM_ENDS = ("bourne", "by", "ley", "more", "side")
SCHOOLS = (
    "{stem} College",
    "the {stem} Academy",
    "{stem} School of Arts",
    "the University of {stem}",
    "{stem} Institute",
)
EMPLOYERS = (
    "{stem} & Sons",
    "{stem} Works",
    "the {stem} Company",
    "{stem} Press",
    "the {stem} Trust",
    "{stem} Brothers",
)

JOBS = _words(
    """actor architect astronomer baker biologist botanist carpenter cellist chemist composer conductor cyclist dancer
    diplomat economist editor engineer explorer farmer fencer geologist goalkeeper historian illustrator inventor
    journalist judge lawyer linguist mathematician midwife novelist nurse organist painter philosopher photographer
    physicist pianist pilot playwright poet potter publisher sailor sculptor singer surgeon swimmer teacher translator
    violinist weaver wrestler zoologist"""
)

MONTHS = _words("January February March April May June July August September October November December")

BIRTH = (
    "{name} was born in {place}.",
    "{name} was born in {place} in {year}.",
    "{name} was born on {date} in {place}.",
    "{name} is {a_job} born in {place}.",
    "{name} is {a_job} who was born in {place}.",
    "{name} (born {year} in {place}) is {a_job}.",
    "{name}, {a_job}, was born in {place}.",
    "{name} is a {place}-born {job}.",
    "{name} is a native of {place}.",
    "{name} came into the world in {place}.",
    "{name}'s birthplace is {place}.",
    "The {job} {name} was born in {place}.",
    "Born in {place}, {name} became {a_job}.",
    "{place} is the birthplace of {name}.",
    "{place} is where {name} was born in {year}.",
    "In {year}, {name} was born in {place}.",
)

# Sentences for the other facts, in the order of a biography that is not permuted.
FACTS = {
    "date": (
        "{name} was born on {date}.",
        "{name}'s date of birth is {date}.",
        "The date of birth of {name} is {date}.",
        "{name} has a birthday on {date}.",
        "On {date}, {name} was born.",
        "It was on {date} that {name} was born.",
        "{name} belongs to the generation of {year}.",
        "The year of {name}'s birth is {year}.",
    ),
    "school": (
        "{name} studied at {school}.",
        "{name} went to {school}.",
        "{name} was a student of {school}.",
        "{name} graduated from {school}.",
        "{name} was educated at {school}.",
        "{name} holds a degree from {school}.",
        "At {school}, {name} was a good student.",
        "{name}'s teachers were at {school}.",
    ),
    "job": (
        "{name} is {a_job}.",
        "{name} works as {a_job}.",
        "{name} is known as {a_job}.",
        "{name} earns a living as {a_job}.",
        "{name} became {a_job}.",
        "{name} trained as {a_job}.",
        "By trade, {name} is {a_job}.",
        "{name}'s profession is that of {a_job}.",
    ),
    "employer": (
        "{name} works for {employer}.",
        "{name} is employed by {employer}.",
        "{name} joined {employer}.",
        "{name} has a post at {employer}.",
        "{name} spent many years with {employer}.",
        "At {employer}, {name} leads a group.",
        "{name}'s employer is {employer}.",
        "The employer of {name} is {employer}.",
    ),
    "city": (
        "{name} lives in {place}.",
        "{name} settled in {place}.",
        "{name} moved to {place}.",
        "{name} has a house in {place}.",
        "{name} resides in {place}.",
        "{name}'s home is in {place}.",
        "The home of {name} is in {place}.",
        "Today {name} is at home in {place}.",
    ),
    "died": (
        "{name} died in {died}.",
        "{name} passed away in {died}.",
        "{name} lived until {died}.",
        "{name}'s life ended in {died}.",
        "In {died}, {name} died.",
        "The year of {name}'s death is {died}.",
        "{name} was buried in {died}.",
        "Many mourned when {name} died in {died}.",
    ),
}
