"""Which encoding is a file in? A byte order mark decides. Without one, every line that is valid
UTF-8 is UTF-8, and the others are in the file's one other encoding: the user gives it, or
charset-normalizer names it from a sample. A file whose other lines nobody can name is refused.

Only the multi-byte answers of charset-normalizer are trusted. Measured on real pages, it names
Western 8-bit encodings wrongly about half the time, and each of these decodes any bytes at all.
"""

import codecs
import contextlib
import itertools
import re
from collections import Counter
from typing import NamedTuple

from charset_normalizer import from_bytes

from groundup.errors import UserError, counted

SAMPLE_BYTES = 2**18  # that charset-normalizer is asked about at once
MARKS = {  # UTF-32's first: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# A codec, and what charset-normalizer may answer that it reads.
TRUSTED = {
    "gb18030": "gb18030 gb2312 gbk",
    "big5hkscs": "big5hkscs big5 cp950",
    "euc_jis_2004": "euc_jis_2004 euc_jp euc_jisx0213",
    "cp932": "cp932 shift_jis shift_jis_2004 shift_jisx0213",
    "cp949": "cp949 euc_kr",
}
CODECS = {name: codec for codec, names in TRUSTED.items() for name in names.split()}
# The part of a codec in which no character has a letter of ASCII as its second byte. A lost byte
# leaves no letter alone there: it leaves an odd byte before the next ASCII character or line end,
# which is a decoding error, or forms a character with a letter. Such a text is not STRICT any more.
STRICT = {"cp949": "euc_kr", "euc_jis_2004": "euc_jis_2004"}
# The same of GB18030: ASCII, characters of two bytes, of four bytes with digits in them.
STRICT_GB18030 = re.compile(
    rb"(?:[\0-\x7f]++|(?:[\x81-\xfe][\x80-\xfe])++|(?:[\x81-\xfe][0-9]){2})*+"
)
# Elsewhere the second byte may be one of @ to ~, and after a loss it stands alone beside wide
# characters, as the A in a text where only half of a comma is left; in Shift-JIS as a kana of half
# width.
LETTER = r"(?!\\[\"/\\])[@-~]"  # not the \\ of JSON's \\"
ALONE = re.compile(
    f"(?<=[^\0-\x7f]){LETTER}(?![@-~])|(?<![@-~]){LETTER}(?=[^\0-\x7f])|[\uff61-\uff9f]"
)
# Brackets around a few words, as of an editor: a lost byte may leave one of them, but no pair. No
# quote is in them, so those of JSON's arrays and objects are none.
PAIR = re.compile(r'\[[^][{}"\n]*\]|\{[^][{}"\n]*\}')
GLUED = re.compile("[\u4e00-\u9fff](?=[A-Za-z])")
STRAY = re.compile("[\ue000-\uf8ff]")  # private characters: a codec has them, but no standard
STRAY_IN = {"cp932": re.compile("[\x80-\xa0\ue000-\uf8ff]")}  # also bytes that mean nothing
ODD = re.compile("[\ue000-\uf8ff\uff61-\uff9f]")  # these, and kana of half width
UNDECODED = re.compile("[\udc80-\udcff]")
# At or in a word, with no wide character behind it, or a word of its own.
ACCENT = re.compile("[A-Za-z][\u00c0-\u024f](?![^\0-\x7f])|[A-Za-z] [\u00c0-\u024f] [A-Za-z]")
HANGUL = re.compile("[\uac00-\ud7a3]")
NOT_ASCII = re.compile("[^\0-\x7f]")
RUNS = re.compile("[^\0-\x7f](?: ?[^\0-\x7f])+")  # old manuals put spaces between characters
WORDS = re.compile(rb"[^\x00-\x2f]*[\x00-\x2f]*")  # bytes below 0x30 are no part of a character
LEAST = 30  # wide characters: fewer tell no encoding
# Of a shorter text only Chinese in GBK can be told, by the most frequent characters. Measured on
# lines of manual pages in 15 other encodings: none of 11,000 has so many of them by chance.
LEAST_COMMON, COMMON_SHARE = 8, 0.4
COMMON = set(  # in UTF-16
    bytes.fromhex(
        "76844e00662f57284e0d4e866709548c4eba8fd94e2d59274e3a4e0a4e2a56fd62114ee589814ed665f66765"
        "75284eec751f52304f5c57304e8e51fa5c3152065bf962104f1a53ef4e3b53d15e7452a8540c5de54e5f80fd"
        "4e0b8fc75b508bf44ea779cd9762800c65b9540e591a5b9a884c5b666cd562406c115f977ecf53414e094e4b"
        "8fdb77407b4990e85ea65bb67535529b91cc59826c3453169ad881ea4e8c74068d775c0f726973b05b9e52a0"
        "91cf90fd4e244f535236673a5f534f7f70b94ece4e1a672c53bb628a6027597d5e945f005b8354088fd856e0"
        "753151764e9b7136524d59165929653f56db65e590a3793e4e494e8b5e735f6276f85168886895f468374e0e"
        "5173540491cd65b07ebf518565706b635fc353cd4f60660e770b539f53c84e4852296bd462164f468d286c14"
        "7b2c54119053547d6b6453d8676153ea6ca17ed389e395ee610f5efa6708516c65e07cfb519b5f8860c58005"
        "67007acb4ee360f35df2901a5e7663d076f49898515a7a0b5c554e94679c65998c61545897694f4d51655e38"
        "6587603b6b2154c15f0f6d3b8bbe53ca7ba172794ef6957f6c428001593457fa8d448fb96d418def7ea75c11"
        "56fe5c717edf63a577e58f835c067ec489c18ba1522b5979624b89d2671f68398bba8fd0519c630751e04e5d"
        "533a5f3a653e51b3897f88ab5e72505a5fc56218514856de52194efb53d6636e5904"
    ).decode("utf-16-be")
)
CHINESE_MARKS = set(
    "\uff0c\u3002\u3001\uff1b\uff1a\uff1f\uff01\uff08\uff09\u300a\u300b\u201c\u201d\u3000"
)
HAN = re.compile("[\u4e00-\u9fff]")
KANA = re.compile("[\u3040-\u30ff]")
ESCAPES = re.compile(rb"\x1b\$[@B]|\x1b\$\([CD]|\x1b\$\)[ACG]")
HZ = re.compile(rb"~\{(?:[\x21-\x77][\x21-\x7e])+~\}")


# First bytes of everyday characters, and the least second byte.
EVERYDAY = {
    "gb18030": ({0xA1, 0xA3, *range(0xB0, 0xD8)}, 0xA1),
    "big5hkscs": (range(0xA1, 0xC7), 0x40),
    "euc_jis_2004": ({0xA1, 0xA4, 0xA5, *range(0xB0, 0xD0)}, 0xA1),
    "cp932": ({0x81, 0x82, 0x83, *range(0x88, 0x98)}, 0x40),
    "cp949": ({0xA1, *range(0xB0, 0xC9)}, 0xA1),
}
EVERYDAY_SHARE = 0.7
CHANCE_SHARE = 0.3  # of COMMON characters, which Korean read as Chinese hardly has


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
    # Two witnesses, for NULs may be damage: charset-normalizer, and more spaces and line ends on
    # this side than on the other.
    sample = head[: 2**16]
    found = from_bytes(sample[: len(sample) // 2 * 2]).best()
    if found is None or head[0] >= 0xFE:
        return ""
    for codec in ("utf-16-le", "utf-16-be"):  # UTF-32 without a mark hardly exists
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
        if wrong := not_as_given(sample.split(b"\n"), given):
            return Verdict(refused=wrong)
        own = standing_alone(sample.split(b"\n"), given)
        return Verdict(given, False, True, own, hint=f" (encoding={given} was given)")
    with contextlib.suppress(UnicodeDecodeError):
        sample.decode()
        return Verdict()
    return judge_lines(sample.split(b"\n"))


def judge_lines(lines: list[bytes]) -> Verdict:
    """Decide about lines that are not all UTF-8. Those beyond ASCII tell: which of them are UTF-8,
    and what are the others?"""
    wide = [line for line in lines if not line.isascii()]
    utf8 = [line for line in wide if reads_as(line, "utf-8")]
    foreign = len(wide) - len(utf8)
    if not foreign:
        return Verdict()
    found = set(utf8)
    others = [line for line in lines if line not in found]
    # The last line may be cut within a character.
    named = others[:-1] if len(others) > 1 and others[-1] == lines[-1] else others
    codecs_found, likely = names_of(named)
    if len(codecs_found) > 1:
        what = f"its lines are in several encodings: {', '.join(sorted(codecs_found))}"
        return Verdict(refused=f"{what}; separate them, and convert each: {ICONV}")
    if codecs_found:
        codec = codecs_found.pop()
        # Some lines of any encoding are valid UTF-8 by accident. More make it a mixed file, in
        # which a line that reads both ways is refused instead of guessed.
        n_sure = sum(is_surely_utf8(line.decode("utf-8", "ignore")) for line in utf8)
        mixed = n_sure > foreign / 1000 or len(utf8) > 2 + foreign / 50
        return Verdict(codec, mixed, foreign > len(utf8), standing_alone(others, codec))
    hint = f"; {convert(likely)}"
    # A few lines in a file of UTF-8 or ASCII are damage. More of them are another encoding.
    if foreign <= max(len(utf8) / 4, len(lines) / 100):
        return Verdict(hint=hint)
    n_lines = len(lines) - (lines[-1] == b"")  # nothing stands behind the last line end
    what = f"not UTF-8: {foreign:,} of {counted(n_lines, 'line')} looked at"
    return Verdict(refused=f"{what}{hint}", hint=hint)


ICONV = "iconv -f ENCODING -t UTF-8"


def convert(likely: str) -> str:
    """Return what the user can do about a file that is likely in this encoding ("" = unknown)."""
    if not likely:
        how = f"give --encoding=NAME to prepare.py or convert it: {ICONV}"
        return f"no encoding is likely; if it is text, {how}"
    how = f"give --encoding={likely} to prepare.py, or convert it"
    return f"perhaps {likely}; {how}: {ICONV.replace('ENCODING', likely)}"


def not_as_given(lines: list[bytes], given: str) -> str:
    """Return what is wrong if most lines beyond ASCII are neither in the encoding that the user
    gave nor in UTF-8; "" if nothing is. A line with some damage counts as read."""
    wide = [line for line in lines if not line.isascii()]
    names = "utf-8" if given == "utf-8" else f"{given} or utf-8"
    n_bad = sum(not any(reads_as(line, codec) for codec in ("utf-8", given)) for line in wide)
    if n_bad <= len(wide) / 2:
        return ""
    hint = "leave encoding out, and it is recognised if possible"
    return f"{n_bad:,} of {len(wide):,} lines beyond ASCII cannot be read as {names}; {hint}"


def standing_alone(lines: list[bytes], codec: str) -> frozenset[str]:
    """Return the ASCII characters that stand alone beside wide ones at least twice: a text has its
    vitamin C more than once, a lost byte makes each only by chance."""
    text = b"\n".join(lines).decode(codec, "replace")
    counts = Counter(found[0] for found in alone_in(text))
    least = 2 + len(text) // 20_000
    return frozenset(character for character, n in counts.items() if n >= least)


def alone_in(text: str) -> list[re.Match]:
    """Return what stands ALONE in a text, without brackets that make a pair."""
    pairs = (found.span() for found in PAIR.finditer(text))
    paired = {place for begin, end in pairs for place in (begin, end - 1)}
    return [found for found in ALONE.finditer(text) if found.start() not in paired]


def reads_as(line: bytes, codec: str) -> bool:
    """Return whether a line is in an encoding, or in it with some damage: a fifth of the bytes of
    GB18030 are valid UTF-8 by accident, so half as many errors as characters are too many."""
    text = line.decode(codec, "replace")
    n_bad = text.count("\ufffd")
    return n_bad <= (len(NOT_ASCII.findall(text)) - n_bad) / 2


def is_surely_utf8(text: str) -> bool:
    """Return whether a line that is valid UTF-8 is no line of another encoding by accident. Of
    143,668 lines of GBK 289 are: they repeat a word or two, whose characters have two bytes in
    both, such as that for "system". An accent in or beside words is no accident: of 212,621
    lines in Chinese, Japanese and Korean encodings none has it so."""
    many = max(text) >= "\u0800" or len(set(NOT_ASCII.findall(text))) > 5
    return many or bool(ACCENT.search(text))


def names_of(lines: list[bytes]) -> tuple[set[str], str]:
    """Return (the codecs that lines are in, their likely encoding): no codec if none of TRUSTED is
    found, several for files that were put together.

    A damaged line hides the encoding of the lines around it, so if all of them together have none,
    groups of lines vote."""
    # ASCII lines help to tell text from noise, but too many of them hide the others.
    whole = b"\n".join(lines)
    found = name_of(whole[:SAMPLE_BYTES])
    alone = name_of(b"\n".join(line for line in lines if not line.isascii())[:SAMPLE_BYTES])
    if found[0] and any(alone) and found != alone:
        found = "", alone[1] or found[0]
    elif not any(found):
        found = alone
    votes = Counter(name_of(group) for group in groups(whole))
    # Two groups in each of two encodings are no accident, unless the groups are short.
    large = {codec for codec, likely in votes if codec and votes[codec, likely] >= 2}
    if len(large) > 1 and sum(map(len, lines)) >= SAMPLE_BYTES // 4:
        return large, ""
    if found[0]:
        return {found[0]}, ""
    votes.pop(("", ""), None)
    (codec, likely), n_votes = votes.most_common(1)[0] if votes else (found, 0)
    if n_votes > votes.total() / 2 and codec and is_plausible(whole, codec):
        return {codec}, ""
    if is_common_chinese(whole):
        return {"gb18030"}, ""
    # Not sure enough to read it so, but worth telling the user.
    guess = found[1] or likely or codec
    return set(), likely_of_asia(whole, guess) or guess


def groups(raw: bytes) -> list[bytes]:
    """Return a text in eight groups of equal size, cut between words: an array of JSON may be one
    line. Groups in ASCII are left out."""
    words = WORDS.findall(raw)
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
        codec = CODECS.get(match.encoding, "")
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


def likely_of_asia(raw: bytes, guess: str) -> str:
    """Return the encoding in which a text too short to be sure has the most everyday characters, ""
    if none has many. guess: charset-normalizer's, which takes most short Chinese for Korean."""
    if guess and guess not in (*CODECS, "johab"):
        return ""
    shares = {codec: everyday_share(raw, codec) for codec in TRUSTED}
    # Kana have the same bytes in both. Without any it is hardly Japanese.
    del shares["gb18030" if has_kana(raw, "gb18030") else "euc_jis_2004"]
    most = max(shares.values())
    if most < EVERYDAY_SHARE:
        return ""
    # Of equal ones the last: each everyday character of Korean is one of Chinese, too.
    best = [codec for codec in TRUSTED if shares.get(codec) == most][-1]
    is_chinese = best == "cp949" and shares.get("gb18030") == most
    best = "gb18030" if is_chinese and common_share(raw) >= CHANCE_SHARE else best
    return {"big5hkscs": "big5", "euc_jis_2004": "euc-jp"}.get(best, best)  # for iconv, too


def everyday_share(raw: bytes, codec: str) -> float:
    """Return the share of wide characters that the standard lists first: the more frequent half of
    the ideographs, all syllables of Hangul, kana."""
    first_bytes, least = EVERYDAY[codec]
    wide = NOT_ASCII.findall(raw.decode(codec, "replace"))
    written = [char.encode(codec, "replace") for char in wide]
    n = sum(len(one) == 2 and one[0] in first_bytes and one[1] >= least for one in written)
    return n / max(1, len(wide))


def common_share(raw: bytes) -> float:
    """Return the share of wide characters that are among the most frequent of Chinese."""
    wide = chinese_characters(raw.decode("gb18030", "replace"))
    return sum(char in COMMON for char in wide) / max(1, len(wide))


def chinese_characters(text: str) -> list[str]:
    return [char for char in text if char > "\x7f" and char not in CHINESE_MARKS]


def has_kana(raw: bytes, codec: str) -> bool:
    text = raw.decode(codec, "replace")
    return len(KANA.findall(text)) > 0.1 * len(NOT_ASCII.findall(text))


def is_plausible(raw: bytes, codec: str) -> bool:
    """Return whether bytes read as text in a multi-byte codec: nearly all words decode, and most
    wide characters have a wide neighbour. Accents of Western text stand alone between letters."""
    n_bad = 0
    words = [word for word in WORDS.findall(raw) if not word.isascii()]
    for word in words:
        try:  # cp949 gives nearly all bytes a meaning, EUC-KR those that Korean uses
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
    return len(chinese_characters(text)) >= LEAST_COMMON and common_share(raw) >= COMMON_SHARE


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


class LostByte(UnicodeDecodeError):
    """A line that can be decoded, but looks as if a byte were missing."""

    def __str__(self) -> str:
        return self.reason


class Decoder:
    """Decodes the lines of one file, in their order."""

    def __init__(self, verdict: Verdict = Verdict()) -> None:  # noqa: B008
        self.other = verdict.other
        self.mixed = verdict.mixed
        self.own = verdict.own
        self.hint = verdict.hint
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
            if b"\n" in raw[:-1]:  # a paragraph, whose lines may differ
                return self.decode_lines(raw)
        else:
            if not self.other or text.isascii():
                return text
            # Valid UTF-8 in a file of another encoding: which of the two is this line in?
            if self.name == "utf-8" or is_surely_utf8(text) or not self.reads(raw):
                self.name = "utf-8"
                return text
            if self.mixed:
                why = f"the line may be UTF-8 or {self.other}"
                raise UnicodeDecodeError(self.other, raw, 0, len(raw), why)
        self.name = self.other
        return self.decode_other(raw)

    def decode_lines(self, raw: bytes) -> str:
        """Return the text of a paragraph. Raise UnicodeDecodeError with the place in all of it."""
        texts, begin = [], 0
        for line in raw.split(b"\n"):
            try:
                texts.append(self.decode(line))
            except UnicodeDecodeError as error:
                error.object = raw
                error.start += begin
                error.end += begin
                raise
            begin += len(line) + 1
        return "\n".join(texts)

    def decode_other(self, raw: bytes) -> str:
        """Return the text of a line in the other encoding. Raise UnicodeDecodeError, also where a
        byte was lost."""
        text = raw.decode(self.other)
        if self.other not in TRUSTED:
            return text
        odd = self.stray.finditer(text)
        if not self.shows_losses(raw):
            alone = (found for found in alone_in(text) if found[0] not in self.own)
            odd = itertools.chain(alone, odd)
            if self.other == "gb18030":
                odd = itertools.chain(odd, filter(ate_a_letter, GLUED.finditer(text)))
        if found := next(odd, None):
            place = len(text[: found.start()].encode(self.other))
            where = f"before {found[0]!r}, byte {place + 1} of the line"
            how = f"convert the file: iconv -f {self.other.replace('_', '-')} -t UTF-8"
            why = f"it looks as if a byte was lost {where}; if the line is right, {how}"
            raise LostByte(self.other, raw, place, place + 1, why)
        return text

    def shows_losses(self, raw: bytes) -> bool:
        """Return whether a lost byte would show in a line otherwise than by a letter alone."""
        if self.other == "gb18030":
            return STRICT_GB18030.fullmatch(raw) is not None
        try:
            return self.other in STRICT and bool(raw.decode(STRICT[self.other]))
        except UnicodeDecodeError:
            return False

    def reads(self, raw: bytes) -> bool:
        """Return whether a line is valid in the other encoding, if that has several bytes."""
        try:
            return self.other in TRUSTED and bool(raw.decode(self.other))
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
        if self.other in TRUSTED:
            characters = list(text)
            for found in alone_in(text):
                if found[0] not in self.own:
                    characters[found.start()] = "\udc80"
            text = self.stray.sub("\udc80", "".join(characters))
        return text
