"""One short text in several languages, written for this course.

A tokenizer that learnt on Python code cuts other scripts into more tokens: the same message has
another length in each. Attention sees only tokens and does not care.
"""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "English": (
        "Reading is slow when every word must be fetched from a distant shelf. "
        "Keep the books you need on the desk, and you will read faster without reading less."
    ),
    "Persian": (
        "خواندن وقتی کند است که هر واژه را باید از قفسه‌ای دور بیاوریم. "
        "کتاب‌هایی را که لازم داری روی میز بگذار؛ تندتر می‌خوانی، بی‌آنکه کمتر بخوانی."
    ),
    "German": (
        "Lesen ist langsam, wenn man jedes Wort aus einem fernen Regal holen muss. "
        "Lege die Bücher, die du brauchst, auf den Tisch: Du liest schneller und nicht weniger."
    ),
    "Russian": (
        "Чтение идёт медленно, когда за каждым словом надо ходить к дальней полке. "
        "Держи нужные книги на столе, и ты будешь читать быстрее, не читая меньше."
    ),
    "Arabic": (
        "القراءة بطيئة حين يجب جلب كل كلمة من رف بعيد. "
        "ضع الكتب التي تحتاجها على الطاولة، فتقرأ أسرع دون أن تقرأ أقل."
    ),
    "Hindi": (
        "जब हर शब्द दूर की अलमारी से लाना पड़े, तो पढ़ना धीमा होता है। "
        "ज़रूरी किताबें मेज़ पर रखो, तब कम पढ़े बिना तेज़ पढ़ोगे।"
    ),
    "Chinese": (
        "如果每个词都要从远处的书架上取来，阅读就会很慢。"
        "把需要的书放在桌上，读得更快，却不会读得更少。"
    ),
}
