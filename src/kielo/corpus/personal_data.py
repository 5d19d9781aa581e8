"""Personal data in text, each replaced by the name of its kind, and counted.

E-mail and IP addresses are known by their form, phone numbers by the countries' plans (phonenumbers), IBANs
and national numbers by their check digits (python-stdnum). A number without a check digit that fits stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address

import regex

from kielo.corpus.step import CorpusStep, SplitDocument
from kielo.recipe.errors import KieloError

KINDS = ("email", "ip", "iban", "national_number", "phone")
# Language → the countries whose phone and national numbers are expected in its text.
COUNTRIES = {
    "bg": "BG", "cs": "CZ", "da": "DK", "de": "DE AT CH", "el": "GR CY", "en": "GB US IE", "es": "ES",
    "et": "EE", "fi": "FI", "fr": "FR BE CH", "ga": "IE", "he": "IL", "hr": "HR", "is": "IS",
    "it": "IT", "ja": "JP", "ko": "KR", "lt": "LT", "lv": "LV", "nb": "NO", "nl": "NL BE", "nn": "NO",
    "pl": "PL", "pt": "PT BR", "ro": "RO", "se": "NO SE FI", "sk": "SK", "sl": "SI", "sv": "SE FI",
    "tr": "TR", "uk": "UA", "zh": "CN",
}  # fmt: skip
# Country → the modules of python-stdnum that check its national numbers.
_NATIONAL = {
    "AT": "vnr", "BE": "nn", "BG": "egn", "CN": "ric", "CZ": "rc", "DE": "idnr", "DK": "cpr", "EE": "ik",
    "ES": "dni nie", "FI": "hetu", "FR": "nir", "GR": "amka", "HR": "oib", "IE": "pps", "IL": "idnr",
    "IS": "kennitala", "IT": "codicefiscale", "KR": "rrn", "LT": "asmens", "NL": "bsn",
    "NO": "fodselsnummer", "PL": "pesel", "RO": "cnp", "SE": "personnummer", "SI": "emso", "SK": "rc",
    "TR": "tckimlik",
}  # fmt: skip
_EMAIL = regex.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.\p{L}{2,}(?![\w-])")
_IP = regex.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4})(?![\w:]|\.\d)"
)
_IBAN = regex.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)")
_NUMBER = regex.compile(r"(?<![\w.,])[A-Z]{0,6}\d[\dA-Z]*(?:[-+ ]\d[\dA-Z]*){0,5}(?!\w|[.,]\d)")
_SEVEN_DIGITS = regex.compile(r"\d(?:[ ().\-/]{0,3}\d){6}")
_MIN_CHARACTERS = 8  # of a national number


@dataclass
class MaskPersonalData(CorpusStep):
    """A step that writes `[EMAIL]`, `[PHONE]` and the like in place of personal data of the given kinds."""

    name = "personal data"
    kinds: Sequence[str]
    languages: Sequence[str]

    def __post_init__(self) -> None:
        if missing := [name for name in ("phonenumbers", "stdnum") if find_spec(name) is None]:
            raise KieloError(
                f"corpus.mask_personal_data needs {' and '.join(missing)}, which is not installed. Fix: pip "
                "install 'kielo[quality]'"
            )

    def work(self, document: SplitDocument) -> bool:
        lines = [self._masked(line) for line in document.lines]
        if lines != document.lines:
            document.set_lines(lines)
        return True

    def _masked(self, line: str) -> str:
        if "@" in line and "email" in self.kinds:
            line = self._mask("email", _EMAIL, line, lambda found: True)
        if not any(map(str.isdigit, line)):
            return line
        for kind, pattern, is_one in self._numbers:
            line = self._mask(kind, pattern, line, is_one)
        if "phone" in self.kinds and _SEVEN_DIGITS.search(line):
            line = self._without_phones(line)
        return line

    def _mask(self, kind: str, pattern: regex.Pattern, line: str, is_one: Callable[[str], bool]) -> str:
        def mask(match: regex.Match) -> str:
            if not is_one(match[0]):
                return match[0]
            self.count("masked", kind)
            return f"[{kind.upper()}]"

        return pattern.sub(mask, line)

    def _without_phones(self, line: str) -> str:
        from phonenumbers import PhoneNumberMatcher

        found: dict[int, int] = {}
        countries: list[str | None] = [*self.countries]
        for country in countries or [None]:
            for match in PhoneNumberMatcher(line, country):
                if all(match.end <= start or end <= match.start for start, end in found.items()):
                    found[match.start] = match.end
        for start, end in sorted(found.items(), reverse=True):
            line = f"{line[:start]}[PHONE]{line[end:]}"
            self.count("masked", "phone")
        return line

    @cached_property
    def countries(self) -> list[str]:
        return list(dict.fromkeys(one for code in self.languages for one in COUNTRIES.get(code, "").split()))

    @cached_property
    def _numbers(self) -> list[tuple[str, regex.Pattern, Callable[[str], bool]]]:
        from stdnum import iban

        checks = self._national_checks()
        found: list[tuple[str, regex.Pattern, Callable[[str], bool]]] = [
            ("ip", _IP, _is_public_ip),
            ("iban", _IBAN, iban.is_valid),
            (
                "national_number",
                _NUMBER,
                lambda text: len(text) >= _MIN_CHARACTERS and any(is_one(text) for is_one in checks),
            ),
        ]
        return [row for row in found if row[0] in self.kinds]

    def _national_checks(self) -> list[Callable[[str], bool]]:
        names = [(one.lower(), name) for one in self.countries for name in _NATIONAL.get(one, "").split()]
        # `is` is a word of Python.
        modules = [import_module(f"stdnum.{'is_' if one == 'is' else one}.{name}") for one, name in names]
        return [module.is_valid for module in modules]


def _is_public_ip(text: str) -> bool:
    """Return True for an address that can be a person's: not of a network of one's own, and no version."""
    try:
        return ip_address(text).is_global
    except ValueError:
        return False
