"""Word pairs that stand in one relation, and sentences in which either word of two such pairs fits.

Written for this study from common knowledge. Within a relation no word occurs twice, so that two pairs a:b
and c:d always have four different words. A word may occur in several relations (a country has a capital, a
currency and a language): `templates` keeps all its pairs on one side of a split.

A sentence names two words, in {0} and {1}, and ends where one of them must follow.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """Pairs a:b of one kind."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    first, second = zip(*(entry.split(":") for entry in text.split()), strict=True)
    return tuple(zip(first, second, strict=True))


CAPITALS = Relation(
    name="capitals",
    pairs=_pairs(
        "France:Paris Japan:Tokyo Germany:Berlin Italy:Rome Spain:Madrid Russia:Moscow China:Beijing "
        "Greece:Athens Egypt:Cairo Turkey:Ankara Poland:Warsaw Sweden:Stockholm Norway:Oslo Portugal:Lisbon "
        "Austria:Vienna Hungary:Budapest Ireland:Dublin Cuba:Havana Peru:Lima Kenya:Nairobi Iran:Tehran "
        "Iraq:Baghdad Thailand:Bangkok Vietnam:Hanoi Canada:Ottawa Belgium:Brussels Finland:Helsinki "
        "Denmark:Copenhagen Syria:Damascus Lebanon:Beirut Israel:Jerusalem Ukraine:Kiev Korea:Seoul "
        "Romania:Bucharest Bulgaria:Sofia Serbia:Belgrade Switzerland:Bern Afghanistan:Kabul Nepal:Kathmandu "
        "Philippines:Manila Indonesia:Jakarta England:London"
    ),
    sentences=(
        "After a long debate over whether to move to {0} or to {1}, the family moved to",
        "They could spend the summer in {0} or in {1}, and in the end they spent it in",
        "The airline offered a flight to {0} or to {1}, and she said she would fly to",
        "His two favourite places were {0} and {1}, so for the wedding he chose",
    ),
)

CURRENCIES = Relation(
    name="currencies",
    pairs=_pairs(
        "Japan:yen India:rupee China:yuan Russia:ruble Mexico:peso Turkey:lira Israel:shekel Thailand:baht "
        "Poland:zloty Switzerland:franc Iran:rial Kenya:shilling Malaysia:ringgit Hungary:forint "
        "Nigeria:naira England:pound America:dollar Germany:euro Sweden:krona Denmark:krone Kuwait:dinar "
        "Morocco:dirham"
    ),
    sentences=(
        "The two words on the board were {0} and {1}, and the pupil copied the word",
        "The crossword had room for {0} or for {1}, so he wrote down the word",
        "The judges would accept {0} or {1} here, and our team answered with the word",
        "On the list she found {0} and {1}, and she crossed out the word",
    ),
)

LANGUAGES = Relation(
    name="languages",
    pairs=_pairs(
        "Japan:Japanese France:French Germany:German Spain:Spanish Italy:Italian Russia:Russian "
        "China:Chinese Poland:Polish Greece:Greek Turkey:Turkish Sweden:Swedish Norway:Norwegian "
        "Denmark:Danish Finland:Finnish Hungary:Hungarian Portugal:Portuguese Netherlands:Dutch "
        "Vietnam:Vietnamese Thailand:Thai Iran:Persian Israel:Hebrew Egypt:Arabic Ukraine:Ukrainian "
        "Romania:Romanian Bulgaria:Bulgarian Korea:Korean India:Hindi Ireland:Irish "
        "England:English Serbia:Serbian"
    ),
    sentences=(
        "She could write her essay about {0} or about {1}, and she wrote it about",
        "The lecture this week is either on {0} or on {1}, and we hope it is on",
        "The shelf held one book about {0} and one about {1}, and he took the one about",
        "Asked whether he knew more about {0} or about {1}, he said he knew more about",
    ),
)

FAMILY = Relation(
    name="family",
    pairs=_pairs(
        "man:woman king:queen prince:princess father:mother son:daughter brother:sister uncle:aunt "
        "husband:wife boy:girl nephew:niece grandfather:grandmother actor:actress waiter:waitress "
        "duke:duchess groom:bride emperor:empress wizard:witch monk:nun lord:lady hero:heroine host:hostess "
        "grandson:granddaughter policeman:policewoman god:goddess gentleman:gentlewoman widower:widow"
    ),
    sentences=(
        "The clerk could help the {0} or the {1} first, and decided to help the",
        "Both the {0} and the {1} waited at the door, and the guard let in the",
        "The letter was meant for the {0} or for the {1}, but it was opened by the",
        "The painter had met the {0} and the {1}, and wanted to paint the",
    ),
)

YOUNG = Relation(
    name="young animals",
    pairs=_pairs(
        "dog:puppy cat:kitten cow:calf horse:foal sheep:lamb goat:kid pig:piglet bear:cub deer:fawn "
        "duck:duckling swan:cygnet frog:tadpole kangaroo:joey hen:chick goose:gosling butterfly:caterpillar "
        "rabbit:bunny eagle:eaglet owl:owlet moth:larva"
    ),
    sentences=(
        "The farmer could feed the {0} or the {1} first, and went to feed the",
        "In the picture were the {0} and the {1}, and the child pointed at the",
        "The fence kept out the {0} but not the {1}, so they looked after the",
        "Everyone had seen the {0} and the {1}, but the story was about the",
    ),
)

HOMES = Relation(
    name="homes of animals",
    pairs=_pairs(
        "bird:nest bee:hive spider:web lion:den horse:stable dog:kennel beaver:lodge ant:hill rabbit:burrow "
        "pig:sty fish:aquarium sheep:pen hen:coop snail:shell bat:cave"
    ),
    sentences=(
        "The poem is about the {0} or perhaps the {1}, and its title is the",
        "The photographer went to see the {0} and the {1}, and took a picture of the",
        "The class asked about the {0} and about the {1}, and the teacher explained the",
        "She drew the {0} first and then the {1}, and she coloured only the",
    ),
)

RELATIONS = (CAPITALS, CURRENCIES, LANGUAGES, FAMILY, YOUNG, HOMES)
