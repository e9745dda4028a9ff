"""Diorama's vocabulary: synonyms of its attributes, and words that it accepts and ignores."""

from __future__ import annotations

# The first word of each is the usual one.
COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "crimson", "scarlet", "ruby"),
    "orange": ("orange", "tangerine", "amber"),
    "yellow": ("yellow", "golden", "lemon", "gold"),
    "green": ("green", "emerald", "lime"),
    "blue": ("blue", "azure", "navy", "turquoise"),
    "purple": ("purple", "violet", "lavender", "lilac", "indigo"),
    "pink": ("pink", "magenta", "rosy", "fuchsia"),
    "white": ("white", "ivory", "whitish"),
}

# Singular and plural.
SUBJECT_NOUNS: dict[str, tuple[tuple[str, str], ...]] = {
    "boat": (("boat", "boats"), ("sailboat", "sailboats"), ("ship", "ships"), ("sailing boat", "sailing boats"),
             ("yacht", "yachts"), ("vessel", "vessels"), ("ferry", "ferries")),
    "balloon": (("balloon", "balloons"), ("hot-air balloon", "hot-air balloons"), ("airship", "airships")),
    "bird": (("bird", "birds"), ("songbird", "songbirds"), ("sparrow", "sparrows"), ("birdie", "birdies"),
             ("seagull", "seagulls"), ("robin", "robins"), ("dove", "doves")),
    "fish": (("fish", "fish"), ("fish", "fishes"), ("goldfish", "goldfish")),
    "car": (("car", "cars"), ("automobile", "automobiles"), ("motor car", "motor cars"), ("taxi", "taxis"),
            ("cab", "cabs"), ("vehicle", "vehicles")),
    "train": (("train", "trains"), ("locomotive", "locomotives"), ("steam train", "steam trains"),
              ("steam engine", "steam engines")),
    "kite": (("kite", "kites"), ("paper kite", "paper kites")),
    "rocket": (("rocket", "rockets"), ("spaceship", "spaceships"), ("rocket ship", "rocket ships"),
               ("spacecraft", "spacecraft"), ("shuttle", "shuttles")),
    "ball": (("ball", "balls"), ("beach ball", "beach balls"), ("football", "footballs")),
    "star": (("star", "stars"), ("smiling star", "smiling stars")),
    "butterfly": (("butterfly", "butterflies"), ("moth", "moths")),
    "cat": (("cat", "cats"), ("kitten", "kittens"), ("kitty", "kitties")),
}  # fmt: skip

Verb = tuple[str, str, str]  # she sails, they sail, sailing
GENERIC: tuple[Verb, ...] = (
    ("moves", "move", "moving"), ("goes", "go", "going"), ("travels", "travel", "travelling"),
    ("heads", "head", "heading"), ("glides", "glide", "gliding"), ("drifts", "drift", "drifting"),
)  # fmt: skip
OWN_VERBS: dict[str, tuple[Verb, ...]] = {
    "boat": (("sails", "sail", "sailing"), ("floats", "float", "floating"), ("cruises", "cruise", "cruising")),
    "balloon": (("floats", "float", "floating"), ("hovers", "hover", "hovering"), ("flies", "fly", "flying")),
    "bird": (("flies", "fly", "flying"), ("soars", "soar", "soaring")),
    "fish": (("swims", "swim", "swimming"), ("darts", "dart", "darting")),
    "car": (
        ("drives", "drive", "driving"),
        ("rolls", "roll", "rolling"),
        ("races", "race", "racing"),
        ("speeds", "speed", "speeding"),
    ),
    "train": (("chugs", "chug", "chugging"), ("rolls", "roll", "rolling"), ("steams", "steam", "steaming")),
    "kite": (("flies", "fly", "flying"), ("sails", "sail", "sailing")),
    "rocket": (("flies", "fly", "flying"), ("zooms", "zoom", "zooming"), ("shoots", "shoot", "shooting")),
    "ball": (("rolls", "roll", "rolling"), ("flies", "fly", "flying")),
    "star": (("floats", "float", "floating"), ("wanders", "wander", "wandering")),
    "butterfly": (("flutters", "flutter", "fluttering"), ("flies", "fly", "flying")),
    "cat": (
        ("walks", "walk", "walking"),
        ("runs", "run", "running"),
        ("strolls", "stroll", "strolling"),
        ("trots", "trot", "trotting"),
        ("prowls", "prowl", "prowling"),
        ("jogs", "jog", "jogging"),
    ),
}
# Verbs that say the motion by themselves.
MOTION_VERBS: dict[str, tuple[Verb, ...]] = {
    "up": (("rises", "rise", "rising"), ("climbs", "climb", "climbing"), ("ascends", "ascend", "ascending"),
           ("takes off", "take off", "taking off"), ("lifts off", "lift off", "lifting off"),
           ("blasts off", "blast off", "blasting off"), ("launches", "launch", "launching")),
    "down": (("sinks", "sink", "sinking"), ("descends", "descend", "descending"), ("drops", "drop", "dropping"),
             ("falls", "fall", "falling"), ("lands", "land", "landing")),
    "bouncing": (("bounces", "bounce", "bouncing"), ("hops", "hop", "hopping"), ("jumps", "jump", "jumping"),
                 ("bounces up and down", "bounce up and down", "bouncing up and down"),
                 ("hops up and down", "hop up and down", "hopping up and down"),
                 ("jumps up and down", "jump up and down", "jumping up and down"),
                 ("leaps", "leap", "leaping")),
    "circling": (("circles", "circle", "circling"), ("circles around", "circle around", "circling around"),
                 ("loops", "loop", "looping"), ("goes round in circles", "go round in circles",
                                                "going round in circles"),
                 ("goes in circles", "go in circles", "going in circles"),
                 ("loops the loop", "loop the loop", "looping the loop")),
}  # fmt: skip
DIRECTIONS: dict[str, tuple[str, ...]] = {
    "left": ("left", "to the left", "leftwards", "towards the left", "from right to left", "leftward",
             "toward the left", "off to the left", "to the left side"),
    "right": ("right", "to the right", "rightwards", "towards the right", "from left to right", "rightward",
              "toward the right", "off to the right", "to the right side"),
    "up": ("up", "upwards", "upward", "to the top", "higher and higher", "straight up", "high up"),
    "down": ("down", "downwards", "downward", "to the bottom", "lower and lower", "straight down"),
    "circling": ("in circles", "in a circle", "round and round", "around in circles", "round in circles", "in loops"),
}  # fmt: skip

PLACES: dict[str, tuple[str, ...]] = {
    "sea": ("on the {} sea", "on a {} sea", "at sea", "over the {} ocean", "on the {} water", "over the {} waves",
            "by the {} sea", "across the {} ocean", "above the {} sea", "in the {} sea", "on the {} ocean",
            "over the {} sea", "on the {} lake", "across the {} lake", "on the {} river", "in the {} harbour",
            "at the {} seaside", "across the {} sea", "across the {} bay"),
    "hills": ("over the {} hills", "in the {} hills", "over {} rolling hills", "in the {} countryside",
              "among the {} hills and trees", "across the {} meadow", "through the {} hills", "past the {} trees",
              "in the {} valley", "on the {} hills", "across the {} hills", "in the {} park", "in the {} garden",
              "on the {} grass", "in the {} forest", "through the {} woods"),
    "city": ("in the {} city", "in {} town", "downtown", "through the {} city", "above the {} city",
             "over the {} rooftops", "in the {} streets", "past the {} houses", "between the {} buildings",
             "over the {} town", "in a {} city", "over the {} city", "in the {} village", "on the {} road",
             "along the {} street", "past the {} skyscrapers", "over the {} roofs", "in front of the {} skyline"),
    "desert": ("in the {} desert", "across the {} desert", "over the {} dunes", "over the {} sand",
               "in the {} sand dunes", "among the {} cacti", "through the {} desert", "over the {} desert"),
    "snow": ("over the {} snow", "in the {} snowy mountains", "on a {} snowy field", "in the {} mountains",
             "in the {} arctic", "across the {} ice", "over {} snow-covered mountains", "over a {} field of snow",
             "in a {} winter landscape", "in the {} snowy hills", "past {} snowy peaks", "over the {} mountains",
             "on the {} mountains", "on the {} snow", "across the {} glacier", "in the {} alps"),
    "sky": ("in the {} sky", "high in the {} sky", "in the {} air", "above the {} clouds", "among the {} clouds",
            "between the {} clouds", "over the {} clouds", "in the {} open sky", "through the {} clouds",
            "across the {} sky"),
}  # fmt: skip
PLACE_TAGS = {
    "sea": ("sea", "ocean", "water", "waves"), "hills": ("hills", "countryside", "meadow"),
    "city": ("city", "town", "buildings"), "desert": ("desert", "dunes", "sand"),
    "snow": ("mountains", "snowy mountains", "winter landscape", "snow field"), "sky": ("sky", "clouds", "air"),
}  # fmt: skip

TIMES_WHEN: dict[str, tuple[str, ...]] = {
    "morning": ("in the morning", "at dawn", "at sunrise", "early in the morning", "at daybreak",
                "in the early morning", "as the sun rises", "in the morning light"),
    "day": ("by day", "during the day", "at noon", "in the daytime", "in daylight", "at midday",
            "in broad daylight", "in the middle of the day", "in the afternoon"),
    "sunset": ("at sunset", "in the evening", "at dusk", "as the sun sets", "in the evening light", "at twilight",
               "under the setting sun", "at sundown"),
    "night": ("at night", "by night", "under the moon", "at midnight", "in the moonlight", "in the dark",
              "late at night", "during the night", "by moonlight"),
}  # fmt: skip
TIME_NOUNS = {
    "morning": ("morning", "dawn", "sunrise"), "day": ("day", "noon"), "sunset": ("evening", "sunset", "dusk"),
    "night": ("night", "midnight"),
}  # fmt: skip

WEATHER_WHEN: dict[str, tuple[str, ...]] = {
    "clear": ("in clear weather", "in fine weather", "in good weather", "under clear skies", "in dry weather",
              "when the weather is clear", "without rain or snow"),
    "rain": ("in the rain", "while it rains", "in rainy weather", "as rain falls", "with rain falling",
             "while it is raining", "in a shower", "in heavy rain", "in a rainstorm", "in the drizzle",
             "under rain clouds", "on a rainy day", "in the pouring rain", "in a downpour"),
    "snow": ("while it snows", "in falling snow", "with snow falling", "while it is snowing", "in the snowfall",
             "as snowflakes fall", "in a snowstorm", "in snowy weather", "with snowflakes", "as snow falls",
             "in a blizzard"),
}  # fmt: skip
WEATHER_ADJECTIVES = {"clear": ("clear", "fair", "cloudless"), "rain": ("rainy", "wet", "stormy"), "snow": ("snowy",)}
WEATHER_TAGS = {
    "clear": ("clear weather", "fine weather", "clear"), "rain": ("rain", "raining", "rainy", "raindrops", "shower"),
    "snow": ("snowing", "snowfall", "snowflakes", "falling snow", "snowstorm"),
}  # fmt: skip

SUBJECT_ADJECTIVES = (
    "little", "small", "tiny", "big", "large", "cute", "pretty", "beautiful", "happy", "lovely", "old", "new", "shiny",
    "paper", "lonely", "funny", "friendly", "single", "nice", "round", "cheerful", "sweet", "toy",
)  # fmt: skip
PLACE_ADJECTIVES = (
    "calm", "quiet", "wide", "peaceful", "endless", "still", "gentle", "vast", "silent", "beautiful", "lonely", "soft",
    "sleepy", "empty", "distant",
)  # fmt: skip
ADVERBS = (
    "slowly", "gently", "quickly", "fast", "softly", "happily", "smoothly", "quietly", "steadily", "calmly", "swiftly",
    "gracefully", "merrily", "lazily", "peacefully",
)  # fmt: skip
OPENINGS = (
    "a video of", "an animation of", "a paper cut of", "a picture of", "show me", "a scene with", "imagine",
    "a clip of", "a short film of", "a paper-cut animation of", "here is", "look at",
)  # fmt: skip

# Understood as saying nothing: sprinkled through training captions so that they change nothing.
FILLERS = (
    "a", "an", "the", "this", "that", "these", "those", "some", "one", "two", "2", "both", "pair", "of", "and", "with",
    "in", "on", "at", "by", "to", "from", "over", "under", "above", "below", "through", "across", "around", "along",
    "near", "past", "into", "out", "off", "up", "down", "between", "among", "behind", "beside", "before", "after",
    "is", "are", "was", "be", "being", "it", "its", "he", "she", "they", "them", "their", "his", "her", "my", "your",
    "our", "we", "you", "i", "me", "s", "there", "here", "where", "when", "while", "as", "then", "now", "just", "very",
    "quite", "really", "so", "too", "also", "again", "still", "all", "every", "each", "other", "another", "more",
    "many", "few", "no", "not", "without", "or", "but", "for", "like", "who", "which", "what", "how", "make", "draw",
    "create", "please", "want", "see", "let", "video", "clip", "film", "movie", "animation", "picture", "image",
    "scene", "style", "paper", "cut", "cutout", "art", "craft", "colourful", "colorful", "bright", "dark", "light",
    "soft", "warm", "cold", "cool", "hot", "beautiful", "pretty", "lovely", "nice", "cute", "great", "amazing",
    "magical", "dreamy", "cosy", "cozy", "simple", "detailed", "smooth", "cinematic", "background", "foreground",
    "front", "back", "top", "bottom", "side", "middle", "center", "centre", "little", "small", "tiny", "big", "large",
    "huge", "giant", "long", "short", "tall", "high", "low", "old", "young", "new", "shiny", "happy", "sad", "funny",
    "friendly", "lonely", "cheerful", "quiet", "calm", "peaceful", "gentle", "wild", "wide", "open", "far", "away",
    "close", "slowly", "gently", "quickly", "fast", "slow", "softly", "happily", "merrily", "time", "day", "world",
    "toy", "wooden", "flat", "soaring", "playing", "looking", "something", "thing", "things", "colour", "color",
    "coloured", "colored", "shape", "way", "its", "own", "same", "together", "alone", "towards", "toward", "during",
    "until", "across", "sunny", "weather", "season", "good", "fine", "fresh", "clean", "deep", "shallow", "winter",
    "landscape", "horizon", "sun", "moon", "sunlight", "moonlit", "moonlight", "starry", "cloudy", "cloud", "wave",
    "hill", "mountain", "house", "building", "street", "tree", "cactus", "dune", "peak", "field", "ice",
)  # fmt: skip

# Further words that people use. The text encoder reads each like the known word, whose embedding it shares.
LIKE: dict[str, str] = {
    "vessel": "ship", "vessels": "ships", "ferry": "ship", "ferries": "ships", "seagull": "bird", "seagulls": "birds",
    "robin": "sparrow", "robins": "sparrows", "dove": "bird", "doves": "birds", "cab": "taxi", "cabs": "taxis",
    "vehicle": "car", "vehicles": "cars", "shuttle": "spaceship", "shuttles": "spaceships", "football": "ball",
    "footballs": "balls", "lake": "sea", "river": "sea", "harbour": "sea", "harbor": "sea", "bay": "sea",
    "seaside": "sea", "park": "meadow", "garden": "meadow", "grass": "meadow", "forest": "trees", "woods": "trees",
    "village": "town", "road": "streets", "skyscrapers": "buildings", "roofs": "rooftops", "skyline": "city",
    "glacier": "ice", "alps": "mountains", "launches": "rises", "launch": "rise", "launching": "rising",
    "lifts": "rises", "lift": "rise", "lifting": "rising", "blasts": "rises", "blast": "rise", "blasting": "rising",
    "jogs": "runs", "jog": "run", "jogging": "running", "trots": "walks", "trot": "walk", "trotting": "walking",
    "prowls": "walks", "prowl": "walk", "prowling": "walking", "cruises": "sails", "cruise": "sail",
    "cruising": "sailing", "speeds": "races", "speed": "race", "speeding": "racing", "hovers": "floats",
    "hover": "float", "hovering": "floating", "afternoon": "day", "nighttime": "night", "downpour": "rainstorm",
    "gold": "golden", "turquoise": "azure", "indigo": "violet", "lilac": "lavender", "fuchsia": "magenta",
}  # fmt: skip
