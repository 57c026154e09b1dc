"""Words of the second planted corpus: written after the method was fixed, none shared with the first on purpose."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


TOPICS = {
    "weather": """
    drizzle hurricane barometer humidity forecast gale snowfall drought lightning mist sleet cyclone hail
    rainfall gust""",
    "theatre": """
    actor rehearsal audience curtain playwright stagehand monologue comedy tragedy costume encore script
    prompter matinee applause""",
    "mining": """
    shaft ore seam pickaxe coal tunnel lode smelter quarry miner copper zinc drill shovel colliery""",
    "tennis": """
    racket serve volley backhand deuce baseline umpiring smash forehand rally seed clay doubles tiebreak
    wimbledon""",
    "beekeeping": """
    hive honey swarm nectar beeswax apiary drone comb pollen smoker brood larva sting clover keeper""",
    "banking": """
    loan deposit interest mortgage vault cheque credit bond teller currency dividend broker savings ledger debt""",
    "geology": """
    basalt granite fault sediment magma fossil limestone erosion strata quartz glacier mantle lava shale
    tectonic""",
    "printing": """
    ink typeface engraving margin folio woodcut binder parchment press-room lithograph stencil proof compositor
    serif galley""",
    "aviation": """
    runway cockpit propeller glider altitude hangar airfield biplane wingspan fuselage pilot takeoff rudders
    turbine parachute""",
    "weaving": """
    loom shuttle warp weft yarn spindle wool tapestry flax fabric linen bobbin dyer thread silk""",
}
ENDINGS = [
    "council",
    "city council",
    "despite",
    "so far",
    "rather than",
    "an heir",
    "lantern",
    "in front of",
]
NGRAMS = [
    "once upon a time",
    "red velvet",
    "on behalf of",
    "more or less",
    "high tide",
    "from now on",
    "not yet",
    "day after day",
]
STEMS_ING = _words("""
drinking jumping growing knowing asking keeping feeding hoping losing moving paying running
""")
STEMS_TION = _words("""
action edition tradition condition addition ambition duration section junction audition vocation option
""")
CAPITALS = _words("""
UNICEF CNN NHL GDP DNA USSR IMF EEC RAF MIT
""")
FILLER = _words("""
afternoon anchorless apple arm artist autumn baby bag balloon barrel bed bell bench bird boat body bone book boot bowl
box boy branch brick brush bucket bus cake camera camp cap car card cart cat chain chair cheese cherry chest chicken
child circle clock coat coffee collar cord cotton cow crown cup dish doctor dog door dress drum duck dust ear earth
egg elbow elephant engine eye face feather fence field finger fire fish flag floor flower fly fog foot fork fox frame
frog fruit gate giant gift girl glass glove goat grass hair hall hand hat head heart hill hole horn horse hospital
house ice idea jar jewel juice kettle key king kitchen kite knee knife lamp leaf leg lemon library lion lip lock
machine map medal milk money monkey moon mouse mouth mud nail neck nest net newspaper night nose nut ocean oil page
pan park parrot peach pear pen pencil phone piano picture pig pillow pipe plate pond pot prince prize queenly rabbit
rain ring road robe rock roof room root rope rose sail salt sand school scissor sea shelf shell ship shirt shoe shop
sky smoke snake snow soap sock sofa soup spider square squirrel stamp star stick stone string sugar sun sword tail tea
tent tiger toe tooth toy tree truck turtle umbrella vase wall watermill wheel wing wolf
""")
FUNCTION = _words("""
the the the of of and and in in to a a an was were is be this with for on not as by at or from he she they
""")
NAMES = _words("""
Aldous Brigid Cedric Dagmar Egbert Fiona Gustav Harriet Ingmar Judith Konrad Lavinia Mortimer Nadia Osric Pauline
""")
