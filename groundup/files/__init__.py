"""What do these files say?

In: raw files (text, JSON, CSV, parquet, compressed). Out: documents, conversations and preference
pairs, and in which split each belongs. Read paths and streams (bytes), then readers, encodings,
records and parquet (containers) for how files are taken apart; row_formats, turns and text_keys for
what a row means and whether it can be trained on; splits; sources (of `input`) and text_mix (for
tokenizers); answer_files (what sample.py writes); functions (of a user's file). untrusted reads
what belongs to a checkpoint from elsewhere. disk has what a file system may refuse: locks, links,
removals; directories are locked, or made whole.
"""

# How tools stand in a system message: turns writes them so, tokens/templates.py reads them.
TOOLS_HEAD = (  # the wording of Qwen2.5's chat template
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
