"""Sentences that the corpus tests are made of, and recipes around them."""

from kielo.recipe.sections import Corpus, Recipe

ESTONIAN = [
    "Vanaema istus õhtul kamina ees ja jutustas lastele pikki lugusid oma noorusest.",
    "Järgmisel hommikul sõitsid nad rongiga pealinna, et seal vana sõpra külastada.",
    "Metsa servas kasvasid kõrged kuused, mille vahel jooksis kitsas rada jõe äärde.",
    "Õpetaja selgitas, miks vesi külmub talvel ja kuidas jää hoiab kalu elus.",
    "Kes teisele auku kaevab, see ise sisse kukub, ütleb meie rahva vanasõna.",
    "Linnavalitsus otsustas ehitada uue silla, sest vana oli muutunud ohtlikuks.",
    "Sügisel korjavad paljud pered metsast seeni ja keedavad marjadest moosi.",
    "Raamatukogu avatakse kell kümme ning suletakse õhtul alles kella kaheksaks.",
]
ENGLISH = [
    "The committee will meet again next week to discuss the remaining questions.",
    "She walked slowly along the river, thinking about what her brother had said.",
    "Click the button to open the dialog and choose the settings that you need.",
]


def estonian_document(number: int) -> str:
    """Three different Estonian lines, none of which is in another document."""
    lines = [ESTONIAN[(number + offset) % len(ESTONIAN)] for offset in range(3)]
    return "\n".join(f"{line[:-1]} ({number})." for line in lines)


def recipe(path, language="et", **corpus) -> Recipe:
    return Recipe(
        name="trial", language=language, corpus=Corpus(sources=str(path), **({"workers": 1} | corpus))
    )
