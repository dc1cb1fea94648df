"""Which encoding is a file in? A byte order mark decides. Without one, every line that is valid
UTF-8 is UTF-8, and the others are in the file's one other encoding: the user gives it, or
charset-normalizer names it from a sample. A file whose other lines nobody can name is refused.

Only the multi-byte answers of charset-normalizer are trusted. Measured on real pages, it names
Western 8-bit encodings wrongly about half the time, and each of these decodes any bytes at all.
"""

import codecs
import itertools
import re
from collections import Counter
from typing import NamedTuple

from charset_normalizer import from_bytes

from groundup.errors import UserError

SAMPLE_BYTES = 2**18  # that charset-normalizer is asked about at once
MARKS = {  # UTF-32's first: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# What charset-normalizer may answer, and the codec that reads it and its extensions.
TRUSTED = {
    "gb2312": "gb18030", "gbk": "gb18030", "gb18030": "gb18030",
    "big5": "big5hkscs", "big5hkscs": "big5hkscs", "cp950": "big5hkscs",
    "euc_jp": "euc_jis_2004", "euc_jis_2004": "euc_jis_2004", "euc_jisx0213": "euc_jis_2004",
    "shift_jis": "cp932", "cp932": "cp932",
    "shift_jis_2004": "cp932", "shift_jisx0213": "cp932",
    "euc_kr": "cp949", "cp949": "cp949",
}  # fmt: skip
# The part of a codec in which no character has a byte below 0x80. After a lost byte such a text has
# an odd byte before the next ASCII character or line end, so the loss is always a decoding error.
STRICT = {"gb18030": "gb2312", "cp949": "euc_kr", "euc_jis_2004": "euc_jis_2004"}
# Elsewhere the second byte may be one of @ to ~, and after a loss it stands alone beside wide
# characters, as the A in a text where only half of a comma is left; in Shift-JIS as a kana of half
# width.
LETTER = r"(?!\\[\"/\\])[@-~]"  # not the \\ of JSON's \\"
ALONE = re.compile(
    f"(?<=[^\0-\x7f]){LETTER}(?![@-~])|(?<![@-~]){LETTER}(?=[^\0-\x7f])|[\uff61-\uff9f]"
)
GLUED = re.compile("[\u4e00-\u9fff](?=[A-Za-z])")
STRAY = re.compile("[\ue000-\uf8ff]")  # private characters: a codec has them, but no standard
STRAY_IN = {"cp932": re.compile("[\x80-\xa0\ue000-\uf8ff]")}  # also bytes that mean nothing
ODD = re.compile("[\ue000-\uf8ff\uff61-\uff9f]")  # these, and kana of half width
UNDECODED = re.compile("[\udc80-\udcff]")
ACCENT = re.compile("[A-Za-z][\u00c0-\u024f][A-Za-z]")
HANGUL = re.compile("[\uac00-\ud7a3]")
NOT_ASCII = re.compile("[^\0-\x7f]")
RUNS = re.compile("[^\0-\x7f](?: ?[^\0-\x7f])+")  # old manuals put spaces between characters
WORDS = re.compile(rb"[^\x00-\x2f]*[\x00-\x2f]*")  # bytes below 0x30 are no part of a character
LEAST = 30  # wide characters: fewer tell no encoding
# Of a shorter text only Chinese in GBK can be told, by the most frequent characters. Measured on
# lines of manual pages in 15 other encodings: none of 11,000 has so many of them by chance.
LEAST_COMMON, COMMON_SHARE = 8, 0.4
COMMON = set(
    "\u7684\u4e00\u662f\u5728\u4e0d\u4e86\u6709\u548c\u4eba\u8fd9\u4e2d\u5927\u4e3a\u4e0a\u4e2a"
    "\u56fd\u6211\u4ee5\u8981\u4ed6\u65f6\u6765\u7528\u4eec\u751f\u5230\u4f5c\u5730\u4e8e\u51fa"
    "\u5c31\u5206\u5bf9\u6210\u4f1a\u53ef\u4e3b\u53d1\u5e74\u52a8\u540c\u5de5\u4e5f\u80fd\u4e0b"
    "\u8fc7\u5b50\u8bf4\u4ea7\u79cd\u9762\u800c\u65b9\u540e\u591a\u5b9a\u884c\u5b66\u6cd5\u6240"
    "\u6c11\u5f97\u7ecf\u5341\u4e09\u4e4b\u8fdb\u7740\u7b49\u90e8\u5ea6\u5bb6\u7535\u529b\u91cc"
    "\u5982\u6c34\u5316\u9ad8\u81ea\u4e8c\u7406\u8d77\u5c0f\u7269\u73b0\u5b9e\u52a0\u91cf\u90fd"
    "\u4e24\u4f53\u5236\u673a\u5f53\u4f7f\u70b9\u4ece\u4e1a\u672c\u53bb\u628a\u6027\u597d\u5e94"
    "\u5f00\u5b83\u5408\u8fd8\u56e0\u7531\u5176\u4e9b\u7136\u524d\u5916\u5929\u653f\u56db\u65e5"
    "\u90a3\u793e\u4e49\u4e8b\u5e73\u5f62\u76f8\u5168\u8868\u95f4\u6837\u4e0e\u5173\u5404\u91cd"
    "\u65b0\u7ebf\u5185\u6570\u6b63\u5fc3\u53cd\u4f60\u660e\u770b\u539f\u53c8\u4e48\u5229\u6bd4"
    "\u6216\u4f46\u8d28\u6c14\u7b2c\u5411\u9053\u547d\u6b64\u53d8\u6761\u53ea\u6ca1\u7ed3\u89e3"
    "\u95ee\u610f\u5efa\u6708\u516c\u65e0\u7cfb\u519b\u5f88\u60c5\u8005\u6700\u7acb\u4ee3\u60f3"
    "\u5df2\u901a\u5e76\u63d0\u76f4\u9898\u515a\u7a0b\u5c55\u4e94\u679c\u6599\u8c61\u5458\u9769"
    "\u4f4d\u5165\u5e38\u6587\u603b\u6b21\u54c1\u5f0f\u6d3b\u8bbe\u53ca\u7ba1\u7279\u4ef6\u957f"
    "\u6c42\u8001\u5934\u57fa\u8d44\u8fb9\u6d41\u8def\u7ea7\u5c11\u56fe\u5c71\u7edf\u63a5\u77e5"
    "\u8f83\u5c06\u7ec4\u89c1\u8ba1\u522b\u5979\u624b\u89d2\u671f\u6839\u8bba\u8fd0\u519c\u6307"
    "\u51e0\u4e5d\u533a\u5f3a\u653e\u51b3\u897f\u88ab\u5e72\u505a\u5fc5\u6218\u5148\u56de\u5219"
    "\u4efb\u53d6\u636e\u5904"
)
CHINESE_MARKS = set(
    "\uff0c\u3002\u3001\uff1b\uff1a\uff1f\uff01\uff08\uff09\u300a\u300b\u201c\u201d\u3000"
)
HAN = re.compile("[\u4e00-\u9fff]")
KANA = re.compile("[\u3040-\u30ff]")
ESCAPES = re.compile(rb"\x1b\$[@B]|\x1b\$\([CD]|\x1b\$\)[ACG]")
HZ = re.compile(rb"~\{(?:[\x21-\x77][\x21-\x7e])+~\}")


class Verdict(NamedTuple):
    """How the bytes of a file become text."""

    other: str = ""  # codec of the lines that are not UTF-8; "" = such lines are damaged
    mixed: bool = False  # some lines are surely in UTF-8, some in the other encoding
    mostly: bool = False  # more lines are in the other encoding than in UTF-8
    own: frozenset[str] = frozenset()  # what stands ALONE in this text more than once
    refused: str = ""  # why the file is not read at all
    hint: str = ""  # what to do about lines that cannot be decoded


def check_codec(name: str) -> str:
    """Return Python's name of an encoding that the user gave. Raise UserError, also for one without
    ASCII's bytes, by which lines and JSON are found."""
    try:
        if not name or b"a\n".decode(name, "replace") == "a\n":
            return codecs.lookup(name).name if name else ""
        what = "does not hold ASCII as it is; convert the files: iconv -f ENCODING -t UTF-8"
    except (LookupError, UnicodeError):
        what = "is not known; give a name like gb18030, big5, shift_jis, latin-1 or cp1251"
    raise UserError(f"config: encoding={name!r} {what}")


def wide_codec(head: bytes) -> str:
    """Return the UTF-16 or UTF-32 codec of a file that begins with `head`, "" if it is neither.
    Without a mark only UTF-16 is recognised, by its NUL bytes and by what it says."""
    for mark, codec in MARKS.items():
        if head.startswith(mark):
            return codec
    if b"\0" not in head:
        return ""
    sample = head[: 2**16]
    found = from_bytes(sample[: len(sample) // 2 * 2]).best()
    if found is None or head[0] >= 0xFE:
        return ""
    for codec in ("utf-16-le", "utf-16-be"):
        text = sample[: len(sample) // 2 * 2].decode(codec, "replace")
        n_bad = text.count("\ufffd")
        if "\0" in text or n_bad > 2 + len(text) / 1000:
            continue
        # Line ends and spaces, and what they are when read from the wrong side or byte.
        right = text.count("\n") + text.count(" ")
        wrong = text.count("\u0a00") + text.count("\u2000")
        if right > 10 * wrong and str(found.encoding).startswith("utf_16"):
            return codec
    return ""


def judge(sample: bytes, given: str = "") -> Verdict:
    """Decide about a file without a mark from a sample of its lines. given: by the user, or ""."""
    if seven_bit := escaped_encoding(sample):
        return Verdict(
            refused=f"it is {seven_bit}, whose bytes look like ASCII; convert it: "
            f"iconv -f {seven_bit} -t UTF-8"
        )
    if given:
        hint = f" (encoding={given} was given)"
        own = standing_alone(sample.split(b"\n"), given)
        return Verdict(given, False, True, own, hint=hint)
    try:
        sample.decode()
        return Verdict()
    except UnicodeDecodeError:
        pass

    lines = sample.split(b"\n")
    n_utf8, n_sure, foreign, others = 0, 0, 0, []
    for line in lines:
        if line.isascii():
            others.append(line)
        elif is_utf8(line):
            n_utf8 += 1
            n_sure += is_surely_utf8(line.decode("utf-8", "ignore"))
        else:
            foreign += 1
            others.append(line)
    if not foreign:
        return Verdict()

    # The last line may be cut within a character.
    named = others[:-1] if len(others) > 1 and others[-1] == lines[-1] else others
    codecs_found, likely = names_of(named)
    if len(codecs_found) > 1:
        what = f"its lines are in several encodings: {', '.join(sorted(codecs_found))}"
        return Verdict(refused=f"{what}; separate them, and convert each: {ICONV}")
    if codecs_found:
        codec = codecs_found.pop()
        mixed = n_sure > foreign / 1000 or n_utf8 > 2 + foreign / 50
        return Verdict(codec, mixed, foreign > n_utf8, standing_alone(others, codec))
    hint = f"; {convert(likely)}"
    # A few lines in a file of UTF-8 or ASCII are damage. More of them are another encoding.
    if foreign <= max(n_utf8 / 4, len(lines) / 100):
        return Verdict(hint=hint)
    what = f"{foreign:,} of {len(lines):,} lines looked at are not UTF-8"
    return Verdict(refused=f"{what}{hint}", hint=hint)


ICONV = "iconv -f ENCODING -t UTF-8"


def convert(likely: str) -> str:
    """Return what the user can do about a file that is likely in this encoding ("" = unknown)."""
    if not likely:
        return f"no encoding is likely; if it is text, give encoding=NAME or convert it: {ICONV}"
    return f"perhaps {likely}; give encoding={likely}, or convert it: {ICONV}"


def standing_alone(lines: list[bytes], codec: str) -> frozenset[str]:
    """Return the ASCII characters that stand alone beside wide ones at least twice: a text has its
    vitamin C more than once, a lost byte makes each only by chance."""
    text = b"\n".join(lines).decode(codec, "replace")
    counts = Counter(ALONE.findall(text))
    least = 2 + len(text) // 20_000
    return frozenset(character for character, n in counts.items() if n >= least)


def is_utf8(line: bytes) -> bool:
    """Return whether a line is UTF-8, or UTF-8 with some damage: a fifth of the bytes of GB18030
    are valid UTF-8 by accident, so half as many errors as characters are too many."""
    text = line.decode("utf-8", "replace")
    n_bad = text.count("\ufffd")
    return n_bad <= (len(NOT_ASCII.findall(text)) - n_bad) / 2


def is_surely_utf8(text: str) -> bool:
    """Return whether a line that is valid UTF-8 is no line of another encoding by accident. Of
    143,668 lines of GBK 289 are: they repeat a word or two, whose characters have two bytes in
    both, such as that for "system". An accent between letters is no accident."""
    many = max(text) >= "\u0800" or len(set(NOT_ASCII.findall(text))) > 5
    return many or bool(ACCENT.search(text))


def names_of(lines: list[bytes]) -> tuple[set[str], str]:
    """Return (the codecs that lines are in, their likely encoding): no codec if none of TRUSTED is
    found, several for files that were put together.

    A damaged line hides the encoding of the lines around it, so if all of them together have none,
    groups of lines vote."""
    # ASCII lines help to tell text from noise, but too many of them hide the others.
    found = name_of(b"\n".join(lines)[:SAMPLE_BYTES])
    alone = name_of(b"\n".join(line for line in lines if not line.isascii())[:SAMPLE_BYTES])
    if found[0] and any(alone) and found != alone:
        found = "", alone[1] or found[0]
    elif not any(found):
        found = alone
    votes = Counter(name_of(group) for group in groups(lines))
    large = {codec for codec, likely in votes if codec and votes[codec, likely] >= 2}
    if len(large) > 1 and sum(map(len, lines)) >= SAMPLE_BYTES // 4:
        return large, ""
    if found[0]:
        return {found[0]}, ""
    votes.pop(("", ""), None)
    (codec, likely), n_votes = votes.most_common(1)[0] if votes else (found, 0)
    if n_votes > votes.total() / 2 and codec and is_plausible(b"\n".join(lines), codec):
        return {codec}, ""
    if is_common_chinese(b"\n".join(lines)):
        return {"gb18030"}, ""
    return set(), found[1] or likely or codec


def groups(lines: list[bytes]) -> list[bytes]:
    """Return the text of lines in eight groups of equal size, cut between words: an array of JSON
    may be one line."""
    words = WORDS.findall(b"\n".join(lines))
    size, n_before = sum(map(len, words)) + 1, 0
    found: list[list[bytes]] = [[] for _ in range(8)]
    for word in words:
        found[8 * n_before // size].append(word)
        n_before += len(word)
    return [joined for group in found if not (joined := b"".join(group)).isascii()]


def name_of(raw: bytes) -> tuple[str, str]:
    """Return (the codec of lines that are not UTF-8, ""), or ("", their likely encoding)."""
    matches = list(from_bytes(raw))  # the best first
    for match in matches:
        codec = TRUSTED.get(match.encoding, "")
        if not codec:
            break
        # Chinese text has hardly any kana. In EUC-JP they have the same bytes as in GB18030.
        if codec == "gb18030" and has_kana(raw, codec):
            codec = "euc_jis_2004"
        # In Shift-JIS theirs are those of rare characters elsewhere.
        if has_kana(raw, "cp932"):
            codec = "cp932"
        if is_plausible(raw, codec):
            return codec, ""
    likely = matches[0].encoding if matches else ""
    # These cannot be: a text in ASCII is UTF-8, and UTF-16 was looked for before.
    return "", "" if likely.startswith(("ascii", "utf_")) else likely


def has_kana(raw: bytes, codec: str) -> bool:
    text = raw.decode(codec, "replace")
    return len(KANA.findall(text)) > 0.1 * len(NOT_ASCII.findall(text))


def is_plausible(raw: bytes, codec: str) -> bool:
    """Return whether bytes read as text in a multi-byte codec: nearly all words decode, and most
    wide characters have a wide neighbour. Accents of Western text stand alone between letters."""
    n_bad = 0
    words = [word for word in WORDS.findall(raw) if not word.isascii()]
    for word in words:
        try:
            word.decode("euc_kr" if codec == "cp949" else codec)
        except UnicodeDecodeError:
            n_bad += 1
    text = raw.decode(codec, "ignore")
    n_wide = len(NOT_ASCII.findall(text))
    n_beside = len(NOT_ASCII.findall("".join(RUNS.findall(text))))
    few_odd = len(ODD.findall(text)) <= 0.02 * n_wide
    few_bad = n_bad <= max(1, 0.1 * len(words)) and n_bad < len(words)
    is_korean = codec != "cp949" or len(HANGUL.findall(text)) >= 0.8 * n_wide
    return n_wide >= LEAST and n_beside >= 0.5 * n_wide and few_bad and few_odd and is_korean


def is_common_chinese(raw: bytes) -> bool:
    """Return whether bytes are valid GB18030 and read as everyday Chinese."""
    try:
        text = raw.decode("gb18030")
    except UnicodeDecodeError:
        return False
    wide = [c for c in text if c > "\x7f" and c not in CHINESE_MARKS]
    n_common = sum(c in COMMON for c in wide)
    return len(wide) >= LEAST_COMMON and n_common >= COMMON_SHARE * len(wide)


def escaped_encoding(sample: bytes) -> str:
    """Return the encoding of a text written in ASCII bytes with escapes, by its name for iconv, ""
    if it is not."""
    if ESCAPES.search(sample):
        return "ISO-2022-KR" if b"\x1b$)C" in sample else "ISO-2022-JP-2"
    for found in HZ.findall(sample):
        try:
            text = found.decode("hz")
        except UnicodeDecodeError:
            continue
        if len(HAN.findall(text)) >= max(2, len(text) / 2):
            return "HZ"
    return ""


def ate_a_letter(found: re.Match) -> bool:
    """Return whether the last byte of a rare character of GB18030 may be the letter before those
    that follow: a byte left alone by a loss forms a character with it, as in ...ICU."""
    raw = found[0].encode("gb18030")
    return len(raw) == 2 and raw[1] < 0x80


class Decoder:
    """Decodes the lines of one file, in their order."""

    def __init__(self, verdict: Verdict = Verdict()) -> None:  # noqa: B008
        self.other = verdict.other
        self.mixed = verdict.mixed
        self.own = verdict.own
        self.hint = verdict.hint
        self.strict = STRICT.get(self.other, "")
        self.stray = STRAY_IN.get(self.other, STRAY)
        # Of the last line that told: ASCII lines are the same in both.
        self.name = self.other if verdict.mostly else "utf-8"

    def decode(self, raw: bytes) -> str:
        """Return the text of a line, or of several. Raise UnicodeDecodeError."""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            if not self.other:
                raise
            if b"\n" in raw[:-1]:  # a paragraph
                return "\n".join(self.decode(line) for line in raw.split(b"\n"))
        else:
            if not self.other or text.isascii():
                return text
            if self.name == "utf-8" or is_surely_utf8(text) or not self.reads(raw):
                self.name = "utf-8"
                return text
            if self.mixed:
                why = f"the line may be UTF-8 or {self.other}"
                raise UnicodeDecodeError(self.other, raw, 0, len(raw), why)
        self.name = self.other
        return self.decode_other(raw)

    def decode_other(self, raw: bytes) -> str:
        """Return the text of a line in the other encoding. Raise UnicodeDecodeError, also where a
        byte was lost."""
        if self.strict:
            try:
                text = raw.decode(self.strict)
                # Python's gb2312 has another dash and dot.
                return raw.decode(self.other) if self.other == "gb18030" else text
            except UnicodeDecodeError:
                pass
        text = raw.decode(self.other)
        if self.other not in TRUSTED.values():
            return text
        odd = (found for found in ALONE.finditer(text) if found[0] not in self.own)
        if self.strict == "gb2312":
            odd = itertools.chain(odd, filter(ate_a_letter, GLUED.finditer(text)))
        if found := next(odd, None) or self.stray.search(text):
            place = len(text[: found.start()].encode(self.other))
            why = "a byte before it seems to be missing"
            raise UnicodeDecodeError(self.other, raw, place, place + 1, why)
        return text

    def reads(self, raw: bytes) -> bool:
        """Return whether a line is valid in the other encoding, if that has several bytes."""
        try:
            return self.other in TRUSTED.values() and bool(raw.decode(self.other))
        except UnicodeDecodeError:
            return False

    def decode_somehow(self, raw: bytes) -> str:
        """Return a text in which every byte that cannot be decoded is a surrogate."""
        try:
            return self.decode(raw)
        except UnicodeDecodeError:
            texts = [
                raw.decode(codec, "surrogateescape") for codec in ("utf-8", self.other) if codec
            ]
        text = min(texts, key=lambda text: len(UNDECODED.findall(text)))
        if self.other in TRUSTED.values():
            text = ALONE.sub(lambda found: found[0] if found[0] in self.own else "\udc80", text)
            text = self.stray.sub("\udc80", text)
        return text
