"""The toy text that stands in for a person's own, Finnish words in as many documents as asked, scripts."""

import io
import json
import random
import shutil
from pathlib import Path

import zstandard

FINNISH = [
    "Isoäiti istui illalla takan ääressä ja kertoi lapsille pitkiä tarinoita nuoruudestaan.",
    "Seuraavana aamuna he matkustivat junalla pääkaupunkiin tapaamaan vanhaa ystävää.",
    "Metsän reunassa kasvoi korkeita kuusia, joiden välissä kulki kapea polku joelle.",
    "Opettaja selitti, miksi vesi jäätyy talvella ja kuinka jää pitää kalat hengissä.",
    "Kaupunginvaltuusto päätti rakentaa uuden sillan, koska vanha oli käynyt vaaralliseksi.",
    "Syksyllä monet perheet poimivat metsästä sieniä ja keittävät marjoista hilloa.",
    "Kirjasto avataan kello kymmenen ja suljetaan illalla vasta kello kahdeksan.",
    "Meri oli tyyni, ja kalastajat laskivat verkkonsa veteen ennen auringon nousua.",
]
DOCUMENTS = 260
SCRIPTS = Path(__file__).parents[1] / "recipe" / "scripts"
WORDS = sorted({word.strip(",.").lower() for sentence in FINNISH for word in sentence.split()})


def document(number: int) -> str:
    """Three sentences of words drawn by the document's number: no two documents are alike."""
    draw = random.Random(number)
    sentences = [" ".join(draw.sample(WORDS, 12)).capitalize() + "." for _ in range(3)]
    return " ".join(sentences)


def write_texts(folder: Path) -> None:
    """Writes each file of text that the pages name."""
    write_lines(folder / "my_text.txt", range(DOCUMENTS))
    write_lines(folder / "text" / "web.txt", range(DOCUMENTS))
    write_lines(folder / "text" / "books.txt", range(DOCUMENTS, 2 * DOCUMENTS))
    rows = io.BytesIO()
    for number in range(2 * DOCUMENTS, 2 * DOCUMENTS + 50):
        rows.write(json.dumps({"text": document(number)}).encode() + b"\n")
    (folder / "more.jsonl.zst").write_bytes(zstandard.compress(rows.getvalue()))
    for name, script in (("pretrain.sh", "viking_7b.sh"), ("train.sh", "smugri_7b.sh")):
        shutil.copy(SCRIPTS / script, folder / name)


def write_lines(path: Path, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(document(number) + "\n" for number in numbers), encoding="utf-8")
