"""Instructions for a chat model that enhances prompts for HunyuanVideo.

The order is that of the captions with which HunyuanVideo was trained. Source: HunyuanVideo: A Systematic Framework For
Large Video Generative Models, section 3.2, https://arxiv.org/abs/2412.03603.
"""

from runtime.models.prompt_guides import PromptGuide

GUIDE = PromptGuide(
    video="""\
Describe in this order: the main subject and what happens to it; details of the subject and of how it moves; the
background; the visual style, such as realistic, cinematic or animated; the shot: its size, its angle, and how the
camera moves; the light; and the mood, as far as it can be seen.
Use simple sentences in the present tense.""",
    image="""\
The video begins with an image that you do not see. Describe how its subject moves, then how the background and the
camera move, if they do. Do not say how things look: the image shows that. Invent no further people or things.""",
    words=120,
)
