"""clean.py and quality.py: cleaning against its promises, every rule on either side of its limit, measures against
brute force."""

import glob
import itertools
import math
import os
import random
import re
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groundup.errors import UserError
from groundup.text import clean as cleaning
from groundup.text import quality
from groundup.text.clean import clean
from groundup.text.quality import RULE_NAMES, RULES, Features, Rules

CURATED, WEB, PUNCTUATION = {"white_space": False}, {}, {"punctuation": True}
ENGLISH = (
    "It was the best of times, it was the worst of times; we had everything before us (so they said), and nothing.\n\n"
    '    "Indented," he wrote -- 3.14, a/b, x:y, http://example.org/?a=b,c...\n\tTabbed line, and so on!!\n'
)

# ---- cleaning -----------------------------------------------------------------------------------------

EMOJI = "\U0001f469\u200d\U0001f4bb and \u2764\ufe0f\u200d\U0001f525"
CLEANED = {
    "one\r\ntwo\rthree\n": "one\ntwo\nthree",
    "\ufeff文\u200b字\u2060": "文字",
    "文\u200d字\u200c": "文字",
    EMOJI: EMOJI,
    "می\u200cخواهم": "می\u200cخواهم",
    "۱۰\u200cهزار و ۵\u200cتایی": "۱۰\u200cهزار و ۵\u200cتایی",  # a number and its unit
    "क्\u200dष": "क्\u200dष",
    "a\u200c\u200cb": "ab",
    "അവന്\u200d അവള്\u200d": "അവന്\u200d അവള്\u200d",  # chillu letters at the ends of words
    "\U0001f642\u200d\u2194\ufe0f ok": "\U0001f642\u200d\u2194\ufe0f ok",
    "\u2060文\u200c\u2060字A\u2060\u200c0": "文字A0",
    "bell\x07 nul\0 tab\t\x1b[0m": "bell nul tab\t[0m",
    "cafe\u0301 １２３ ﬁ": "caf\u00e9 １２３ ﬁ",
    "one  \ntwo\t\u3000\n": "one\ntwo",
    "one\n\n\n\n\ntwo\n \n\t\n\nthree": "one\n\ntwo\n\nthree",
    "a" + " " * 256 + "b": "a" + " " * 256 + "b",
    "a" + " " * 257 + "b": "a" + " " * 256 + "b",
    "a" + "\u3000 " * 5000 + "b": "a" + "\u3000 " * 128 + "b",
    "\n\n  text \n": "text",
    "": "",
    " \n ": "",
    "\ud83d half": "\ud83d half",
}


@pytest.mark.parametrize("text", CLEANED)
def test_clean(text: str) -> None:
    assert clean(text, **WEB) == CLEANED[text]


def test_steps_are_switches() -> None:
    text = "\x07a \u200b\n\n\n\ne\u0301" + " " * 300 + ". "
    assert clean(text, **CURATED) == "a \n\n\n\n\u00e9" + " " * 300 + ". "
    assert clean(text, **WEB) == "a\n\n\u00e9" + " " * 256 + "."
    assert clean("好,好 ", white_space=False, punctuation=True) == "好，好 "


def test_chinese_punctuation() -> None:
    text = "他说:好,真好!真的?(是的);在3.14页.见a,b(图)里(外)中。。。完！！！……没有——了，，a,,b"
    full = "他说：好，真好！真的?(是的);在3.14页。见a,b(图）里（外）中。完！……没有——了，a,,b"
    assert clean(text, **PUNCTUATION) == full
    repeated = "好的!!真的??是,,的。他说:“好”,走了;看《书》,学“字”."
    assert clean(repeated, **PUNCTUATION) == "好的！真的？是，的。他说：“好”，走了；看《书》，学“字”."
    for other in ("等等...好", "类::方法", "若甲!=乙则", "共1,000元", "用print(“a”,“b”)打印", "好!! ok!! yes"):
        assert clean("中文字" * 9 + other, **PUNCTUATION) == "中文字" * 9 + other
    english = "He said: a,b! 好,好 " + "word " * 20
    assert clean(english, **PUNCTUATION) == english.strip()  # less than 0.3 Chinese
    assert clean("好,好 abcdefgh", **PUNCTUATION) == "好,好 abcdefgh"  # 2 of 10 letters
    assert clean("好,好好 abcdefg", **PUNCTUATION) == "好，好好 abcdefg"  # 3 of 10
    assert clean("好,好", **WEB) == "好,好"


PIECES = st.sampled_from(
    list(" \t\n\r\x00\x0b\x1f\u200b\u200c\u200d\ufeff\u2060\u3000\xa0ae\u0301,.!。，(“”好文\u2028\ufe0f\U0001f469")
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.text(PIECES, max_size=60)), st.integers(1, 400), st.booleans())
def test_to_clean_again_changes_nothing(text: str, times: int, punctuation: bool) -> None:
    text = text + text[-3:] * times + text
    for steps in (CURATED, WEB, PUNCTUATION):
        once = clean(text, **steps)
        assert clean(once, **steps) == once


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(" \t\n\xa0\u3000\u2028x"), max_size=40), st.integers(0, 600))
def test_white_space_against_a_plain_way(text: str, run: int) -> None:
    text = f"a{text}{' ' * run}{text}b"
    lines = [line.rstrip(" \t\xa0\u3000") for line in text.split("\n")]
    plain = re.sub("\n\n+", "\n\n", "\n".join(lines))
    plain = re.sub(r"\s+", lambda white: white[0][:256], plain).strip()
    assert clean(text, **WEB) == plain


def test_code_and_english_stay_as_they_are() -> None:
    assert clean(ENGLISH, **CURATED) == ENGLISH
    n = 0
    for path in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py")))[:150]:
        source = Path(path).read_bytes().decode("utf-8", "replace").replace("\x0c", "")  # some have form feeds
        assert clean(source, **CURATED) == unicodedata.normalize("NFC", source), path
        lines = [line.rstrip() for line in source.split("\n")]
        assert clean(source, **WEB) == re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip(), path
        n += 1
    assert n > 50


# ---- rules --------------------------------------------------------------------------------------------


def english(n_words: int, per_line: int = 12, seed: int = 0) -> list[str]:
    """Lines of words that pass every rule: different, of 4 to 8 letters, a stop word here and there."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(4, 8))) for _ in range(n_words)]
    words[1::10] = rng.choices(["the", "of", "and", "to"], k=len(words[1::10]))
    return [" ".join(words[i : i + per_line])[:-1] + "." for i in range(0, n_words, per_line)]


def chinese(n: int, per_line: int = 40, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    characters = [chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(n)]
    characters[1::20] = rng.choices("的在是和", k=len(characters[1::20]))
    return ["".join(characters[i : i + per_line - 1]) + "。" for i in range(0, n, per_line - 1)]


def off(names: Iterable[str]) -> str:
    return ",".join(f"{name}=off" for name in names)


def only(name: str, more: str = "") -> Rules:
    """The rules of a setting with one rule on."""
    return Rules("web", ",".join([f"{name}=on", off(set(RULE_NAMES) - {name}), more]))


def test_good_texts_pass_all_rules() -> None:
    assert Rules("web").check("\n".join(english(600))) == ("", "")
    assert Rules("web").check("\n".join(chinese(800))) == ("", "")


def padded(n_bad: int, n_good: int, bad: str, good: str, joint: str) -> str:
    return joint.join([bad] * n_bad + [good] * n_good)


def numbered(n: int, text: str) -> list[str]:
    """n different lines."""
    return [
        f"{text}{chr(0x4E00 + i)}" if cleaning.language(text) == "zh" else f"{text} {'abcdefghij'[i % 10]}{i}"
        for i in range(n)
    ]


HUNDRED = "".join(map(chr, range(0x4E00, 0x4E00 + 100))) * 3

# name, language: a text that passes, a text that is dropped, both next to the limit
EDGES: dict[tuple[str, str], tuple[str, str]] = {
    ("replacement_characters", "en"): ("\ufffd" + "a" * 999, "\ufffd" + "a" * 998),
    ("replacement_characters", "zh"): ("\ufffd" + "好" * 999, "\ufffd" + "好" * 998),
    ("min_length", "en"): ("word " * 50, "word " * 49),
    ("min_length", "zh"): ("好" * 200, "好" * 199),
    ("max_length", "en"): ("a " * 100_000, "a " * 100_001),
    ("max_length", "zh"): ("好" * 200_000, "好" * 200_001),
    ("han_share", "zh"): ("好" * 30 + "。" * 70, "好" * 29 + "。" * 71),
    ("mean_line_length", "zh"): ("好" * 9 + "\n\n" + "好" * 11, "好" * 9 + "\n" + "好" * 10),
    ("short_words", "en"): ("aaa " * 9 + "bbb", "aaa " * 9 + "bb"),
    ("long_words", "en"): (("a" * 10 + " ") * 10, ("a" * 10 + " ") * 9 + "a" * 11),
    ("hash_signs", "en"): ("# " + "word " * 9, "#" + " word" * 9 + "#"),
    ("hash_signs", "zh"): ("#" + "好" * 19, "#" + "好" * 18),
    ("ellipses", "en"): ("word... " + "word " * 9, "word... word… " + "word " * 9),
    ("ellipses", "zh"): ("…" + "好" * 19, "…" + "好" * 18),
    ("bullet_lines", "en"): (padded(9, 1, "- point", "line", "\n"), padded(10, 1, "• point", "line", "\n\n")),
    ("bullet_lines", "zh"): (padded(9, 1, "·要点", "一行", "\n"), padded(10, 1, "●要点", "一行", "\n")),
    ("ellipsis_lines", "en"): (padded(3, 7, "so ...", "line", "\n"), padded(4, 7, "so…", "line", "\n")),
    ("ellipsis_lines", "zh"): (padded(3, 7, "好……", "一行", "\n"), padded(4, 7, "好...", "一行", "\n")),
    ("letters", "en"): (padded(2, 8, "12", "it's", " "), padded(3, 8, "--", "a1", " ")),
    ("letters", "zh"): ("好" * 50 + "ab" * 5 + "1" * 40, "好" * 50 + "ab" * 5 + "。" * 41),
    ("stop_words", "en"): ("xx The yy of zz", "the the THE, ofx"),
    ("stop_words", "zh"): ("我的好天在", "我的好天的"),
    ("terminal_punctuation", "en"): (padded(12, 88, "Yes.", "no", "\n"), padded(11, 89, "Yes!", "no", "\n")),
    ("terminal_punctuation", "zh"): (padded(107, 893, "好。", "好", "\n"), padded(105, 895, "好？", "好", "\n")),
    ("short_lines", "en"): (padded(67, 33, "a" * 30, "b" * 31, "\n"), padded(68, 32, "a" * 30, "b" * 31, "\n")),
    ("line_ends", "en"): ("w " * 10 + "\n" * 3, "w " * 10 + "\n" * 4),
    ("line_ends", "zh"): ("好" * 1000 + "\n" * 89, "好" * 1000 + "\n" * 90),
    ("duplicate_lines", "en"): (
        "\n".join(["same"] * 31 + numbered(69, "line")), "\n".join(["same"] * 32 + numbered(68, "line"))
    ),
    ("duplicate_lines", "zh"): (
        "\n".join(["好同"] * 288 + numbered(712, "好行")), "\n".join(["好同"] * 289 + numbered(711, "好行"))
    ),
    ("duplicate_line_characters", "en"): (
        "\n".join(["a" * 20] * 2 + ["b" * 60]), "\n".join(["a" * 21] * 2 + ["b" * 58])
    ),
    ("any_duplicate_lines", "en"): ("\n".join(["a"] * 2 + ["b" * 98]), "\n".join(["aa"] * 2 + ["b" * 96])),
    ("any_duplicate_lines", "zh"): ("\n".join(["好"] * 2 + ["文" * 8]), "\n".join(["好好"] * 2 + ["文" * 15])),
    ("duplicate_paragraphs", "en"): (
        "\n\n".join(["same"] * 31 + numbered(69, "part")), "\n\n".join(["same"] * 32 + numbered(68, "part"))
    ),
    ("duplicate_paragraphs", "zh"): (
        "\n\n".join(["好同"] * 31 + numbered(69, "好段")), "\n\n\n".join(["好同"] * 32 + numbered(68, "好段"))
    ),
    ("duplicate_paragraph_characters", "en"): (
        "\n\n".join(["a" * 20] * 2 + ["b" * 60]), "\n\n".join(["a" * 21] * 2 + ["b" * 58])
    ),
    ("duplicate_paragraph_characters", "zh"): (
        "\n\n".join(["好" * 20] * 2 + ["文" * 60]), "\n\n".join(["好" * 21] * 2 + ["文" * 58])
    ),
    ("repeated_13_characters", "zh"): (HUNDRED[:212], HUNDRED[:213]),  # 100 of 200 and 101 of 201
}  # fmt: skip


def gram_edges() -> dict[tuple[str, str], tuple[str, str]]:
    """Units of one length. Of 1000, the most frequent n-gram makes k n, and a copy of m units covers m."""
    edges = {}
    han = [chr(0x4E00 + i) for i in range(3000)]
    for rule in RULES:
        if rule.measure not in ("top", "covered"):
            continue
        for language, limit in (("en", rule.en), ("zh", rule.zh), ("other", rule.other)):
            n, joint = (2 * rule.n, "") if language == "zh" else (rule.n, " ")
            texts = []
            for more in (0, 1):
                first = "a" if language == "en" else "\u0430"  # words of three Latin or Cyrillic letters
                words = map("".join, itertools.product([chr(ord(first) + i) for i in range(20)], repeat=3))
                other = iter(han[100:]) if language == "zh" else words
                gram = [next(other) for _ in range(n)]
                if rule.measure == "top":
                    times = int(limit * 1000 / n + 1e-9) + more
                    units = [unit for _ in range(times) for unit in (*gram, next(other))][:1000]
                    assert times * (n + 1) <= 1000
                else:
                    size = int(limit * 1000 + 1e-9) + more
                    copy = [next(other) for _ in range(size)]
                    units = copy + [next(other)] + copy
                texts.append(joint.join(units + [next(other) for _ in range(1000 - len(units))]))
            edges[rule.name, language] = (texts[0], texts[1])
    return edges


EDGES |= gram_edges()
CYRILLIC = str.maketrans({chr(0x61 + i): chr(0x430 + i) for i in range(26)} | {"好": "б", "文": "в"})
EDGES |= {
    (name, "other"): tuple(text.lower().translate(CYRILLIC) for text in EDGES[name, language])
    for name, language in [(rule.name, "en") for rule in RULES if rule.other and rule.other == rule.en and not rule.n]
    + [("min_length", "zh"), ("any_duplicate_lines", "zh")]
}
EDGES |= {
    ("max_length", "other"): ("ж" * 600_000, "ж" * 600_001),
    ("hash_signs", "other"): ("#" + "ж" * 49, "#" + "ж" * 48),
    ("ellipses", "other"): ("…" + "ж" * 49, "…" + "ж" * 48),
    ("letters", "other"): ("ж" * 5 + "1" * 5, "ж" * 5 + "1" * 6),
    ("line_ends", "other"): ("ж" * 50 + "\n" * 3, "ж" * 50 + "\n" * 4),
}


def test_every_rule_has_its_edges() -> None:
    expected = {(rule.name, "en") for rule in RULES if rule.en is not None}
    expected |= {(rule.name, "zh") for rule in RULES if rule.zh is not None}
    expected |= {(rule.name, "other") for rule in RULES if rule.other is not None}
    assert set(EDGES) == expected


@pytest.mark.parametrize(("name", "language"), sorted(EDGES))
def test_both_sides_of_each_limit(name: str, language: str) -> None:
    kept, dropped = EDGES[name, language]
    assert cleaning.language(kept) == cleaning.language(dropped) == language
    rules = only(name)
    assert rules.check(kept) == ("", "")
    fired, detail = rules.check(dropped)
    rule = next(rule for rule in RULES if rule.name == name)
    assert fired == name and detail.endswith(f" {rule.sign} {getattr(rule, language):g}"), detail


PEOPLES = {  # articles 1 and 2 of the Universal Declaration of Human Rights
    "de": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
        "begabt und sollen einander im Geist der Brüderlichkeit begegnen. Jeder hat Anspruch auf die in diese"
        "r Erklärung verkündeten Rechte und Freiheiten ohne irgendeinen Unterschied, etwa nach Rasse, Hautfar"
        "be, Geschlecht, Sprache, Religion, politischer oder sonstiger Überzeugung, nationaler oder sozialer "
        "Herkunft, Vermögen, Geburt oder sonstigem Stand. Jeder hat das Recht auf Leben, Freiheit und Sicherh"
        "eit der Person."
    ),
    "fr": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et"
        " de conscience et doivent agir les uns envers les autres dans un esprit de fraternité. Chacun peut s"
        "e prévaloir de tous les droits et de toutes les libertés proclamés dans la présente Déclaration, san"
        "s distinction aucune, notamment de race, de couleur, de sexe, de langue, de religion, d'opinion poli"
        "tique ou de toute autre opinion, d'origine nationale ou sociale, de fortune, de naissance ou de tout"
        "e autre situation. Tout individu a droit à la vie, à la liberté et à la sûreté de sa personne."
    ),
    "es": (
        "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón"
        " y conciencia, deben comportarse fraternalmente los unos con los otros. Toda persona tiene los derec"
        "hos y libertades proclamados en esta Declaración, sin distinción alguna de raza, color, sexo, idioma"
        ", religión, opinión política o de cualquier otra índole, origen nacional o social, posición económic"
        "a, nacimiento o cualquier otra condición. Todo individuo tiene derecho a la vida, a la libertad y a "
        "la seguridad de su persona."
    ),
    "ru": (
        "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совесть"
        "ю и должны поступать в отношении друг друга в духе братства. Каждый человек должен обладать всеми пр"
        "авами и всеми свободами, провозглашенными настоящей Декларацией, без какого бы то ни было различия, "
        "как-то в отношении расы, цвета кожи, пола, языка, религии, политических или иных убеждений, национал"
        "ьного или социального происхождения, имущественного, сословного или иного положения. Каждый человек "
        "имеет право на жизнь, на свободу и на личную неприкосновенность."
    ),
    "ko": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천"
        "부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다. 모든"
        " 사람은 인종, 피부색, 성, 언어, 종교, 정치적 또는 기타의 견해, 민족적 또"
        "는 사회적 출신, 재산, 출생 또는 기타의 신분과 같은 어떠한 종류의 차별이 없이"
        ", 이 선언에 규정된 모든 권리와 자유를 향유할 자격이 있다. 모든 사람은 생명과"
        " 신체의 자유와 안전에 대한 권리를 가진다. 어느 누구도 노예상태 또는 예속상태에"
        " 놓여지지 아니한다."
    ),
    "ja": (
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は"
        "、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。すべて人は"
        "、人種、皮膚の色、性、言語、宗教、政治上その他の意見、国民的若しくは社会的出身、財産、門地"
        "その他の地位又はこれに類するいかなる事由による差別をも受けることなく、この宣言に掲げるすべ"
        "ての権利と自由とを享有することができる。すべて人は、生命、自由及び身体の安全に対する権利を"
        "有する。"
    ),
    "ar": (
        "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم بعضا "
        "بروح الإخاء. لكل إنسان حق التمتع بكافة الحقوق والحريات الواردة في هذا الإعلان، دون أي تمييز، كالتميي"
        "ز بسبب العنصر أو اللون أو الجنس أو اللغة أو الدين أو الرأي السياسي أو أي رأي آخر، أو الأصل الوطني أو"
        " الاجتماعي أو الثروة أو الميلاد أو أي وضع آخر. لكل فرد الحق في الحياة والحرية وسلامة شخصه."
    ),
    "hi": (
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्ध"
        "ि और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए। सभी को इस घो"
        "षणा में सन्निहित सभी अधिकारों और आज़ादियों को प्राप्त करने का हक़ है और इस मामले में जाति, वर्ण, लिं"
        "ग, भाषा, धर्म, राजनीति या अन्य विचार-प्रणाली का विचार न किया जाएगा।"
    ),
}


@pytest.mark.parametrize("language", PEOPLES)
def test_good_texts_of_other_languages_pass_the_rules_of_the_web(language: str) -> None:
    text = PEOPLES[language]
    assert cleaning.language(text) == "other"
    assert Rules("web").check(text) == ("", "")
    assert Rules("web").check((text[:60] + "\n") * 9)[0]  # but not whatever they say


def test_language() -> None:
    assert cleaning.language("") == cleaning.language("123 ...") == "en"
    cafe = "They met in Zürich, " + "at some café or other, " + "and went on to the next place. " * 30
    assert cleaning.language(cafe) == "en"
    assert cleaning.language("好好好 abcdefg") == "zh"
    assert cleaning.language("好好好 abcdefgh") == "en"
    assert cleaning.language("中文，夹一个 word") == "zh"


@pytest.mark.parametrize(
    "text", ["", "a", "好", "。", "...", "\n\n\n", " ", "。，！" * 50, "#", "\ufffd", "\ud800", "\0", "1", "-\n-\n-"]
)
def test_degenerate_texts(text: str) -> None:
    for names in ("", "min_length", "min_length,letters,stop_words,han_share,mean_line_length"):
        name, detail = Rules("web", off(filter(None, names.split(",")))).check(text)
        assert "nan" not in detail and "inf" not in detail and name in RULE_NAMES
    features = Features(text)
    for rule in RULES:
        assert math.isfinite(features.measure(rule)), rule.name
    assert Rules("curated").check(text)[0] == (
        "replacement_characters" if text == "\ufffd" else "min_length" if len(text.strip()) < 15 else ""
    )


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text(PIECES, max_size=80)), st.integers(1, 60))
def test_no_text_raises(text: str, times: int) -> None:
    for names in ("", "min_length,letters,stop_words,han_share,mean_line_length,replacement_characters"):
        name, detail = Rules("web", off(filter(None, names.split(",")))).check(text * times)
        assert bool(name) == bool(detail) and "nan" not in detail


def test_curated_rules_are_few() -> None:
    rules = Rules("curated")
    assert rules.check("x" * 15) == ("", "") and rules.check("x" * 14) == ("min_length", "14 < 15")
    assert rules.check("  " + "好" * 14 + " \n") == ("min_length", "14 < 15")
    assert rules.check("book " * 300_000) == ("", "")
    assert rules.check("- x\n" * 100) == ("", "")
    assert rules.check("x" * 50 + "\ufffd")[0] == "replacement_characters"


def test_lengths_of_your_own() -> None:
    rules = Rules("web", "length=10..20," + off(set(RULE_NAMES) - {"min_length", "max_length"}))
    assert [rules.check("x" * n)[0] for n in (9, 10, 20, 21)] == ["min_length", "", "", "max_length"]
    assert [rules.check("好" * n)[0] for n in (9, 10, 20, 21)] == ["min_length", "", "", "max_length"]
    assert Rules("curated", "length=..20").check("x" * 21) == ("max_length", "21 > 20")
    assert Rules("curated", "length=..20").check("x" * 14)[0] == "min_length"
    assert Rules("rows", "length=..20").check("x") == ("", "")


def test_order_and_switches() -> None:
    bad = "{ # - "  # too short, no stop words, no sentence
    assert Rules("web").check(bad)[0] == "min_length"
    assert Rules("web", "min_length=off").check(bad)[0] == "short_words"
    assert Rules("curated", "min_length=off, letters=on, stop_words=on").check(bad)[0] == "letters"
    fired = [Rules("web", off(RULE_NAMES[:i])).check(bad)[0] for i in range(len(RULE_NAMES))]
    places = [RULE_NAMES.index(name) if name else len(RULE_NAMES) for name in fired]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quality": "best"}, "curated or web, got 'best'"),
        ({"changes": "stop_words=off,shortlines=off"}, "no rule 'shortlines' in 'stop_words=off,shortlines=off'"),
        ({"changes": "stop_words"}, "'stop_words' is not understood; give NAME=on, NAME=off, length=5..300"),
        ({"changes": "length=5"}, "'length=5' is not length=least..most, such as 5..300"),
        ({"changes": "length=9..5"}, "is not length=least..most"),
        ({"changes": "keep=/nowhere/rules.py:keep"}, "there is no file '/nowhere/rules.py'"),
        ({"changes": "keep=keep"}, "there is no file 'keep'"),
    ],
)
def test_wrong_settings(settings: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        Rules(**settings)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_hook(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text("def keep(text):\n    return 1 / len(text) < 0.02\n\nlimit = 3\n", encoding="utf-8")
    rules = Rules(changes=f"keep={path}:keep, length=1.., min_length=off")
    assert rules.check("x" * 51) == ("", "")
    assert rules.check("x" * 50) == ("keep", f"{path}:keep returns False")
    assert Rules(changes=f"keep={path}:keep, min_length=off, keep=off").check("x" * 50) == ("", "")
    with pytest.raises(
        UserError, match="rules.py:keep' failed on a text of 0 characters: ZeroDivisionError"
    ) as error:
        rules.check("")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    for wrong in ("limit", "none", ""):
        with pytest.raises(UserError, match="has no function"):
            Rules(changes=f"keep={path}:{wrong}")
    path.write_text("import nothing_like_this", encoding="utf-8")
    with pytest.raises(UserError, match="ModuleNotFoundError"):
        Rules(changes=f"keep={path}:keep")


# ---- n-grams ------------------------------------------------------------------------------------------


def brute_grams(units: list[str], n: int) -> tuple[float, float, float]:
    """Top, covered and repeats as their definitions say."""
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    counts = Counter(grams)
    if not counts or max(counts.values()) < 2:
        return 0.0, 0.0, 0.0
    total = sum(map(len, units))
    gram, most = counts.most_common(1)[0]  # the first of several
    top = most * sum(map(len, gram))
    covered = {i + j for i, gram in enumerate(grams) if gram in grams[:i] for j in range(n)}
    return top / total, sum(len(units[i]) for i in covered) / total, 1 - len(counts) / len(grams)


@pytest.mark.parametrize("n_different", [1, 2, 4, 30])
def test_grams_against_brute_force(n_different: int) -> None:
    rng = random.Random(n_different)
    wanted = (2, 3, 4, 5, 7, 9)
    for _ in range(60):
        units = rng.choices(["w" * (1 + i % 5) + str(i) for i in range(n_different)], k=rng.randint(0, 60))
        if rng.random() < 0.5:
            units += units[rng.randint(0, 5) :][:20]
        ids = np.array([int(unit.strip("w")) for unit in units], np.uint64)
        lengths = np.array(list(map(len, units)), np.int64)
        found = quality.repeated(ids, lengths, wanted, 0.0)
        early = quality.repeated(ids, lengths, wanted, 0.3)
        for n in wanted:
            top, covered, repeats = brute_grams(units, n)
            assert found.get(n, quality.Grams()) == pytest.approx((top, covered, repeats)), (units, n)
            if n not in early:  # it may stop only if it can no longer matter
                assert covered < 0.3 and (top < 0.3 or n > wanted[2])
            else:
                assert early[n] == found[n]


def test_units_of_n_grams() -> None:
    words = "one two three one two four".split()
    assert Features(" ".join(words)).grams[2][:3] == pytest.approx(brute_grams(words, 2))
    characters = "甲乙丙丁，甲乙丙 丁\n完"
    assert Features(characters).grams[4][:3] == pytest.approx(brute_grams(list("甲乙丙丁，甲乙丙丁完"), 4))


def test_classes_are_those_of_every_character() -> None:
    """Python's own answers for all 0x110000, and the ranges of Latin and Chinese letters."""
    letters = [chr(code).isalpha() for code in range(0x110000)]
    spaces = [chr(code).isspace() for code in range(0x110000)]
    classes = cleaning.character_classes()
    han = np.zeros(0x110000, bool)
    for begin, end in cleaning.HAN_RANGES:
        han[begin:end] = True
    assert np.array_equal(classes == cleaning.HAN_CLASS, han)
    assert np.array_equal(np.isin(classes, range(cleaning.LETTERS, cleaning.HAN_CLASS)), np.array(letters) & ~han)
    assert np.array_equal(classes == cleaning.SPACE, np.array(spaces))
