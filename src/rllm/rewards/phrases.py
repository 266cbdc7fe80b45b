r"""Phrases by which people mark an answer as theirs, take it back, or leave it open, in the languages that
models write.

    ANSWER_IS     "the final answer is", "答案是", "Die Antwort lautet", "ans ="
    takes_back    "Wait, that is wrong", "on second thought", "or maybe 6"
    is_courtesy   "I hope this helps!", "Let me know if …", "∎"

Each pattern reads its text once: no two parts of one can match the same characters.
"""

import re

_DECORATION = r"[\s*_`~]{0,8}"
_ENGLISH = (
    r"(?<![a-z])(?:(?:numerical|numeric|final|correct|right|best|exact|simplified|overall)\s+)?"
    r"(?:answers?|ans|result|solution|final value)(?:\s+(?:choice|option))?"
    r"(?:\s+(?:to|for|of)\s+(?:the|this|your|part)[^.:=\n]{1,60}?)?"
)
_ENGLISH_CHOICE = r"(?<![a-z])(?:correct|right|best|my|appropriate)\s+(?:choice|option|statement|one|pick)"
_IS = (
    r"(?:\s+(?:is|are|was|would\s+be|will\s+be|should\s+be|must\s+be|comes\s+out\s+to(?:\s+be)?|equals|becomes)"
    r"(?![a-z])|\s*(?:[:：=→⇒]|->|=>))"
)
_ELSEWHERE = (
    r"(?:respuesta|soluci[oó]n|resultado|r[ée]ponse|r[ée]sultat|risposta|risultato|resposta|resultado)"
    r"(?:\s+(?:final|finale|correcta?|corretta|correcte|definitiva))?"
    r"(?:\s+(?:es|est|è|é|sería|será|serait|sarebbe)(?![a-zà-ÿ])|\s*[:：=])",
    r"(?:antwort|lösung|ergebnis|antwoord|svaret|svar)(?:\s+(?:ist|lautet|is|er|är)(?![a-zà-ÿ])|\s*[:：=])",
    r"(?:(?:最终|正确)?答案(?:应该?)?(?:是|为|爲|為|选|選|：|:|=)|(?:^|\n)\s*答\s*[:：]|故选|应选|因此选|所以选|正确选项(?:是|为)|结果(?:是|为|：))",
    r"(?:答え|解答|正解|回答)(?:は|：|:)",
    r"(?:정답|답|해답)(?:은|는|:|：)",
    r"(?:(?:правильный|окончательный|верный)\s+)?(?:ответ|відповідь)\s*(?:[:：—–=-]|это(?![а-я])|є(?![а-я]))",
    r"(?:odpowied[źz]|odpověď|rezultat|wynik)(?:\s+(?:to|brzmi|je|jest)(?![a-z])|\s*[:：=])",
    r"(?<![a-zà-ÿ])(?:cevap|yanıt|sonuç)(?:\s*[:：=]|\s+)",
    r"(?:الإجابة(?:\s+(?:الصحيحة|النهائية))?|الجواب(?:\s+(?:الصحيح|النهائي))?)(?:\s*[:：]|\s+(?:هي|هو)|\s+)",
    r"(?:उत्तर)(?:\s*[:：]|\s+)",
    r"(?:đáp\s+án|câu\s+trả\s+lời)(?:\s+(?:đúng|cuối\s+cùng))?(?:\s+là|\s*[:：=])",
    r"(?:jawaban(?:nya)?)(?:\s+(?:yang\s+)?(?:benar|akhir))?(?:\s+adalah|\s*[:：=])",
    r"(?:คำตอบ)(?:\s*คือ|\s*[:：])",
    r"(?:απάντηση|התשובה|تשובה|پاسخ|উত্তর|răspunsul|válasz|vastaus|jibu)(?:\s+(?:είναι|היא|este|on|ni)(?!\w)|\s*[:：])",
)
ANSWER_IS = re.compile(
    r"(?P<hashes>(?:^|(?<=\n))\s*####\s*(?=[-−$0-9\\])|(?:^|(?<=\n))\s*####\s)"
    r"|(?P<heading>(?:^|(?<=\n))[ \t]*[#>*_\s]{0,8}(?:the\s+)?(?:final\s+)?(?:answer|result|conclusion"
    r"|réponse|respuesta|答案|antwort)"
    r"[ \t*_:：.]{0,8}(?=\n))"
    rf"|\\(?:text|textbf|mathbf|textit)\{{\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:：=]?\s*\}}\s*[:：=]?"
    rf"|(?:{_ENGLISH}|{_ENGLISH_CHOICE}){_DECORATION}{_IS}"
    rf"|(?:^|(?<=\n))output{_DECORATION}\s*[:：=]"
    rf"|{'|'.join(_ELSEWHERE)}",
    re.IGNORECASE,
)
"""Phrases before a stated answer, up to where the answer begins."""
CONCLUSION = re.compile(
    r"(?:^|(?<=\n))[\s*_>#|-]*(?:A|final|total|in total|sum|result|therefore|thus|so|hence|conclusion"
    r"|∴)(?![a-z])[^.:=：\n0-9$\\]{0,60}"
    r"[:=：|]",
    re.IGNORECASE,
)
"""A label that a line with a number begins with: "Total: 72"."""
IS_THE_ANSWER = re.compile(
    r"(?:\s+(?:is|are|be)\s+(?:the|my|our)\s+(?:(?:final|correct|right|best|required|desired)\s+)*"
    r"(?:answer|choice|option|solution|result|one)|\s+is\s+(?:correct|right))(?![a-z])",
    re.IGNORECASE,
)
"""Phrases behind one."""
_TAKES_BACK = re.compile(
    r"\b(?:wait|hold on|hmm+|scratch that|erratum|(?:edit|update)\s*:"
    r"|(?:it|answer|this|that) should (?:be|have)"
    r"|on second thoughts?|correction|oops|let me re|re-?check(?:ing)?"
    r"|re-?calculat|re-?consider|re-?examin|i (?:made|have made) (?:a|an) (?:mistake|error)|my mistake"
    r"|i was (?:wrong|mistaken)|(?:i am|i'm|i’m) (?:not (?:sure|certain|confident)|unsure|uncertain)"
    r"|not (?:entirely |completely |fully |really |100% )?(?:sure|certain|confident)"
    r"|alternatively(?![^.\n]{0,80}same)"
    r"|isn't (?:right|correct|the)|(?:it|answer|this|that|solution|result) (?:could|might|may)"
    r"|(?:could|might|may) (?:also|just as well|equally|well) (?:be|have)|or (?:maybe|perhaps|possibly"
    r"|rather|is it|even)"
    r"|but (?:maybe|perhaps|wait|no\b|i (?:would|could|might|may|doubt))|i (?:would|'d) rather"
    r"|i take (?:it|that) back"
    r"|but actually|but (?:it|this|that|the [a-z]+)(?:'s|’s| is| was) (?:actually|really|in (?:fact|truth"
    r"|reality)|not\b)|cannot be determined|can't be determined|(?:just|only) a guess|random guess"
    r"|(?<!no )(?<!a )(?<!any )doubt"
    r"|should (?:instead|rather|actually) (?:be|have)|instead it|the (?:correct|real|true"
    r"|right) answer should)"
    r"|(?:\A[\s$*_).\]\\]*|\b(?:that|this|it|which|answer|result|above)(?:'s|’s)?\s+)(?:is |was "
    r"|seems |looks )?"
    r"(?:actually |probably |clearly |also )?(?:(?:the |an? )?(?:wrong|incorrect)"
    r"|not (?:right|correct|it\b|(?:the|my) (?:final |correct |right )?(?:answer|one))"
    r"|an? (?:mistake|guess))"
    r"|(?:\A|[.!?;(\n—])[\s*]*(?:maybe|perhaps|actually|no[,:;!.)\s]|sorry)"
    r"|等等|不对|不對|重新|espera|en realidad|attendez|en fait|moment mal|eigentlich|подожди|на самом деле"
    r"|待って"
    r"|やっぱり",
    re.IGNORECASE,
)
_OPEN = re.compile(
    r"\A[\s$*_).\]\\,]{0,12}(?:\?|(?:or|oder|ou|o|или|或|或者|または|and|/|\+|minus|plus|times|would)(?![a-z])\s)",
    re.IGNORECASE,
)
"""Phrases behind an answer that make it one of several, a part of one, or a question."""
_HEDGED = re.compile(
    r"(?:(?<![a-z])(?:not|never|neither|either|maybe|perhaps|n't|n’t|cannot be|can't be|could be|might be"
    r"|may be|would be\s+if|nor|rule out|ruled out|eliminate|excluding|unlike|instead of|rather than|suppose"
    r"|assume|if(?: it (?:is|were|was))?|between|isn't|aren't|wrong|incorrect|tempting|naive|false"
    r"|(?:first|initially|originally|at first),? (?:thought|guessed|said|got|assumed))"
    r"|\bif (?:you|we|one) (?:forget|forgot|ignore|neglect|skip|omit|miss)\b[^.;\n]*"
    r"|(?<=n't)|(?<=n’t))"
    r"(?:\s+(?:would be|be|that|my|our|the|answer(?: is)?|result(?: is)?|equal(?:s)?(?: to)?|just|simply"
    r"|the (?:final |correct )?answer(?: is)?|it(?:'s| is)?|option|choice|x\s*=|=))*"
    r"[\s$*_(\\\[:,]*\Z",
    re.IGNORECASE,
)
"""The end of what stands before an answer that is denied, supposed or only guessed at."""
_COURTESY = re.compile(
    r"(?:\s|[*_>#-])*(?:i hope|hope (?:this|that|it)|let me know|feel free|please (?:let|feel)"
    r"|if you (?:have|need|want|would|'d)"
    r"|happy to|glad to|i(?:[’']| a)m glad|p\.?\s?s\.|good luck|great question|thank(?:s| you)"
    r"|have a (?:great|nice|good)"
    r"|is there anything|would you like"
    r"|do you (?:want|need)|q\.?e\.?d|∎|□|■|✓|✔|✅|🎉|😊|👍|🙂|cheers|you're welcome|don't hesitate"
    r"|any (?:other )?questions"
    r"|this (?:completes|concludes)|end of (?:solution|proof)|done\b|espero|j'espère|ich hoffe|希望"
    r"|надеюсь|tomara)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_BLANK = re.compile(r"[\s$.,;:!*_`~'\"’”})\]|✓✔✅∎□■🎉😊👍🙂-]*|\\[)\],;! ]|\\end\{[a-z*]+\}")


def takes_back(text: str) -> bool:
    """Whether what follows an answer denies it, doubts it or names another."""
    return _OPEN.match(text) is not None or _TAKES_BACK.search(text) is not None


_DOUBTFUL = re.compile(
    r"\b(?:(?:(?:fewer|less|more|greater|larger|smaller) than|at (?:most|least))(?= [$\\(]{0,3}[0-9])"
    r"|maybe|perhaps|possibly|might|could be|may be|either|both|neither|or|not|n't|don't know"
    r"|do not know|no idea|unsure|uncertain"
    r"|unclear|wrong|incorrect|guess(?:ing)?"
    r"|(?:many|most|some|people) (?:\w+ )?(?:think|say|believe)|cannot|can't"
    r"|unable|depends)\b|n[’']t\b",
    re.IGNORECASE,
)


def is_doubtful(sentence: str) -> bool:
    """Whether a sentence without a mark leaves open what its last word is about."""
    return _DOUBTFUL.search(sentence) is not None


_REFUSES = re.compile(
    r"\b(?:cannot|can't|can’t|could not|couldn't|unable to|not able to|refuse to|decline to)\s+(?:\w+\s+)?"
    r"(?:determine|answer|solve|help|decide|say|tell|find|compute)",
    re.IGNORECASE,
)


def refuses(text: str) -> bool:
    """Whether a text says that it has no answer."""
    return _REFUSES.search(text) is not None


def is_left_open(before: str) -> bool:
    """Whether the words that lead to an answer deny it or only suppose it."""
    return _HEDGED.search(before[-120:]) is not None


def is_courtesy(text: str) -> bool:
    """Whether nothing is left of a text without its pleasantries."""
    return all(
        _COURTESY.match(each) is not None or not _without_marks(each) for each in _SENTENCE.split(text)
    )


def _without_marks(text: str) -> str:
    return _BLANK.sub("", text)


def sentence_begin(text: str, place: int) -> int:
    """Where the sentence, or line, begins in which `place` is."""
    begin = 0
    for match in _SENTENCE.finditer(text, max(0, place - 600), place):
        begin = match.end()
    return max(begin, place - 600)
