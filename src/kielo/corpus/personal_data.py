"""Personal data in text, each replaced by the name of its kind, and counted.

E-mail and IP addresses are known by their form, phone numbers by the countries' plans and groups
(phonenumbers), IBANs and national numbers by their check digits (python-stdnum). Danish numbers have only a
date. Every third number of nine digits fits Poland's plan. So plain digits are a phone number only with a
country's or a trunk code, beside a word such as "tel", or next in a list to a phone number.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

import regex

from kielo.corpus.step import CorpusStep, SplitDocument
from kielo.recipe.errors import KieloError

if TYPE_CHECKING:
    from phonenumbers import PhoneNumberMatch

KINDS = ("email", "ip", "iban", "national_number", "phone")
# Language → the countries whose phone and national numbers are expected in its text.
COUNTRIES = {
    "be": "BY", "bg": "BG", "ca": "ES AD", "cs": "CZ", "da": "DK", "de": "DE AT CH", "el": "GR CY",
    "en": "GB US IE", "es": "ES", "et": "EE", "eu": "ES FR", "fi": "FI", "fo": "FO DK",
    "fr": "FR BE CH", "ga": "IE", "gl": "ES", "hbs": "HR RS BA ME", "he": "IL", "hr": "HR", "hu": "HU",
    "hy": "AM", "id": "ID", "is": "IS", "it": "IT", "ja": "JP", "ka": "GE", "ko": "KR", "lt": "LT",
    "lv": "LV", "mk": "MK", "ms": "MY", "mt": "MT", "nb": "NO", "nl": "NL BE", "nn": "NO", "pl": "PL",
    "pt": "PT BR", "ro": "RO", "ru": "RU", "se": "NO SE FI", "sk": "SK", "sl": "SI", "sq": "AL",
    "sv": "SE FI", "th": "TH", "tr": "TR", "uk": "UA", "vi": "VN", "zh": "CN",
}  # fmt: skip
# Country → the modules of python-stdnum that check its national numbers.
_NATIONAL = {
    "AT": "vnr", "BE": "nn", "BG": "egn", "BR": "cpf", "CH": "ssn", "CN": "ric",
    "CZ": "rc", "DE": "idnr", "DK": "cpr", "EE": "ik",
    "ES": "dni nie", "FI": "hetu", "FR": "nir", "GR": "amka", "HR": "oib", "IE": "pps", "IL": "idnr",
    "IS": "kennitala", "IT": "codicefiscale", "KR": "rrn", "LT": "asmens", "NL": "bsn",
    "NO": "fodselsnummer", "PL": "pesel", "RO": "cnp", "SE": "personnummer", "SI": "emso", "SK": "rc",
    "TR": "tckimlik", "UA": "rntrc",
}  # fmt: skip
# A letter of a script with spaces, or a digit: in Chinese an address has a letter before it.
_W = r"[[\p{L}\p{M}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"
_LETTER = _W.replace("_]--", "]--")  # the same without _, which may mark emphasis around an address
_HEX = "[0-9a-fA-F]"
_EMAIL = regex.compile(
    rf"(?<!{_W}|[.+-])(?:{_W}|[.%+-]){{1,64}}@(?:{_W}|-){{1,63}}(?:\.(?:{_W}|-){{1,63}}){{0,8}}\.\p{{L}}{{2,63}}?(?!_*+{_LETTER})",
    regex.V1,
)
_IPV4 = r"\d{1,3}(?:\.\d{1,3}){3}"
_IP = regex.compile(
    rf"(?<!{_W}|[.])(?:(?<!:{_HEX}{{0,4}}:){_IPV4}"
    rf"|(?<!:)(?:{_HEX}{{0,4}}:){{2,7}}(?:{_HEX}{{1,4}}|{_IPV4})(?!:[0-9a-fA-F:]))(?!{_W}|\.\d)",
    regex.V1,
)
_IBAN = regex.compile(
    rf"(?<!{_W})[A-Z]{{2}}\d{{2}}(?: ?[A-Z0-9]{{4}}){{2,7}}(?: ?[A-Z0-9]{{1,3}})?(?!{_W})", regex.V1
)
_GROUP = r"[A-Z]{0,6}\d[\dA-Z]*(?:[-+/.]\d[\dA-Z]*)*"
_NUMBER = regex.compile(rf"(?<!{_W}|[.,]){_GROUP}(?: {_GROUP})*(?!{_W}|[.,]\d)", regex.V1)
_PART = regex.compile("[^ ]+")
_SEVEN_DIGITS = regex.compile(r"\d(?:[ ().\-/]{0,3}\d){6}")
_DECIMAL = regex.compile(r"(?<!\d)\d{1,3}[.,]$")
# The beginnings of words beside phone numbers, and whole words, in the languages of COUNTRIES.
_STEMS = """
    telef telep teléf téléph telemóv mobil móvil phone cellular celular handy rufnummer hotlin whatsapp viber
    telegram puhelin puhelim matkapuh helista soita anruf volejte zavolej hívj dzwoń zadzwo sunați arayın
    skambin zvani tālrun sími hubungi guthán ċempel телеф мобил звон позвон дзвон факс обадет вайбер вотсап
    τηλέφ τηλεφ κινητ καλέστ φαξ հեռախ ტელეფ მობილ טלפ điện kontakt contact contat yhteys klienditugi infotel
    dzwoni numer number контакт
"""
_WORDS = """
    tel tél tlf tlph telp tālr mob gsm sms fax faks fon puh ring call bel pozovite hp sđt đt fón gọi
    тел моб τηλ հեռ ტელ მობ טל נייד kom(?=[.:]) tlm κιν
"""
_UNSPACED = "電話 电话 手机 手機 携帯 微信 联系 热线 전화 연락처 휴대폰 โทร"
_OF_PHONES = regex.compile(
    rf"(?<!\p{{L}})(?:{'|'.join(_STEMS.split())}|(?:{'|'.join(_WORDS.split())})(?!\p{{L}}))|☎|📞|📱|@|\[EMAIL\]"
    rf"|{'|'.join(_UNSPACED.split())}",
    regex.IGNORECASE,
)
_NEAR = 40  # characters between a plain number and such a word
# Between the phone numbers of a list: signs, or a short word such as "and", "ja" or "und".
_BETWEEN = regex.compile(r"[ ,;/|]*(?:\p{L}{1,5}[ ,;/|]+)?")
_SIZES = range(9, 31)  # characters of a national number, with signs and spaces


def refuse_missing() -> None:
    if missing := [name for name in ("phonenumbers", "stdnum") if find_spec(name) is None]:
        raise KieloError(
            f"corpus.mask_personal_data needs {' and '.join(missing)}, which is not installed. Fix: pip "
            "install 'kielo[quality]'"
        )


def not_masked(kinds: Sequence[str], languages: Sequence[str]) -> str:
    """Return, in words, the numbers of these languages that no mask knows."""
    said = []
    without = [code for code in languages if not COUNTRIES.get(code)]
    if "phone" in kinds and without:
        said.append(f"phone numbers without a country's code in {', '.join(without)}")
    without = [code for code in languages if not _NATIONAL.keys() & set(COUNTRIES.get(code, "").split())]
    if "national_number" in kinds and without:
        said.append(f"national numbers in {', '.join(without)}")
    return " and ".join(said)


@dataclass
class MaskPersonalData(CorpusStep):
    """A step that writes `[EMAIL]`, `[PHONE]` and the like in place of personal data of the given kinds."""

    name = "personal data"
    kinds: Sequence[str]
    languages: Sequence[str]

    def __post_init__(self) -> None:
        refuse_missing()

    def work(self, document: SplitDocument) -> bool:
        lines = [self._masked(line) for line in document.lines]
        if lines != document.lines:
            before = document.num_bytes
            document.set_lines(lines)
            self.count("bytes", "masked", before - document.num_bytes)
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
        beginning = _without_tail(is_one) if kind == "iban" else (lambda text: text if is_one(text) else "")

        def mask(match: regex.Match) -> str:
            text = match[0]
            if found := beginning(text):
                self.count("masked", kind)
                return f"[{kind.upper()}]{text[len(found) :]}"
            # The number may have others beside it.
            return _PART.sub(mask, text) if kind == "national_number" and " " in text else text

        return pattern.sub(mask, line)

    def _without_phones(self, line: str) -> str:
        from phonenumbers import Leniency, PhoneNumberMatcher

        found: list[tuple[int, int]] = []
        countries: list[str | None] = [*self.countries]
        for country in countries or [None]:
            # Grouped as the plan says: a looser match takes amounts and dates for numbers.
            matches = PhoneNumberMatcher(line, country, Leniency.EXACT_GROUPING, max_tries=len(line))
            for one in matches:
                span = one.start, one.end
                if _is_decimal(line, one.start) or not _is_free(span, found):
                    continue
                if _is_written_as_phone(line, one) or _is_next_in_list(line, one.start, found):
                    insort(found, span)
        parts, last = [], 0
        for start, end in found:
            parts += [line[last:start], "[PHONE]"]
            last = end
            self.count("masked", "phone")
        return "".join([*parts, line[last:]])

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
                lambda text: len(text) in _SIZES and any(is_one(text) for is_one in checks),
            ),
        ]
        return [row for row in found if row[0] in self.kinds]

    def _national_checks(self) -> list[Callable[[str], bool]]:
        names = [(one.lower(), name) for one in self.countries for name in _NATIONAL.get(one, "").split()]
        # `is` is a word of Python.
        modules = [import_module(f"stdnum.{'is_' if one == 'is' else one}.{name}") for one, name in names]
        return [module.is_valid for module in modules]


def _is_written_as_phone(line: str, match: "PhoneNumberMatch") -> bool:
    from phonenumbers import national_significant_number

    digits = match.raw_string.strip("()[] ")
    has_code = digits.startswith("0") or len(digits) > len(national_significant_number(match.number))
    if has_code or not digits.isdecimal():
        return True
    near = (match.start - _NEAR, match.start), (match.end, match.end + _NEAR)
    return any(_OF_PHONES.search(line, max(0, begin), end) for begin, end in near)


def _is_next_in_list(line: str, start: int, found: list[tuple[int, int]]) -> bool:
    """Return True if only a comma, a short word or the like stands after the phone number before it."""
    place = bisect_left(found, (start, start))
    return place > 0 and _BETWEEN.fullmatch(line, found[place - 1][1], start) is not None


def _is_decimal(line: str, start: int) -> bool:
    """Return True for the digits behind a decimal sign, such as of 0,8509181282."""
    return _DECIMAL.search(line[max(0, start - 5) : start]) is not None


def _is_free(span: tuple[int, int], found: list[tuple[int, int]]) -> bool:
    """Return True if the span overlaps none of the sorted spans."""
    place = bisect_left(found, span)
    return not (place and found[place - 1][1] > span[0]) and not (
        place < len(found) and found[place][0] < span[1]
    )


def _without_tail(is_one: Callable[[str], bool]) -> Callable[[str], str]:
    """Return a function: text → its longest beginning of whole groups that is one, or ""."""

    def beginning(text: str) -> str:
        while text and not is_one(text):
            text = text.rpartition(" ")[0]
        return text

    return beginning


def _is_public_ip(text: str) -> bool:
    """Return True for an address outside of private networks. Versions of four numbers look alike."""
    try:
        address = ip_address(text)
        return (getattr(address, "ipv4_mapped", None) or address).is_global
    except ValueError:
        return False
