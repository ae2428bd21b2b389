"""The demo's tokenizer: byte-level BPE of 2048 tokens with a chat template, saved as a fast tokenizer.

Knows text and special tokens; knows nothing of models. Its template writes the BOS token itself, as many real
templates do, while its post-processor adds one too: whoever tokenizes a rendered chat with special tokens switched
on gets two.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_text import Message

VOCAB_SIZE = 2048
BOS, EOS, END = "<s>", "</s>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END]
BOS_ID, EOS_ID, END_ID = 0, 1, 5

# Words with their leading space, single digits, punctuation, line ends. Single digits: places such as 119:176 are
# then spelt the same way everywhere.
_SPLIT = r"""'[a-z]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}{{- '<|system|>' + (tools | tojson) + '<|end|>' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception("role '" + message['role'] + "' is unknown to this model; use system, user or assistant") -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(chapters: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from these chapters; the same chapters give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, END)] == [BOS_ID, EOS_ID, END_ID], "special ids moved"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja.

    The class is written under the name that transformers 4 and 5 both load.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def encode_documents(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> list[list[int]]:
    """One document per chapter: BOS, text, EOS."""
    return [[*ids, EOS_ID] for ids in tokenizer(chapters, verbose=False)["input_ids"]]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType, reportReturnType]


def encode_chats(tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]) -> list[list[int]]:
    """One document per conversation, as the template writes it (its own BOS, so none is added)."""
    rendered = [render_chat(conversation) for conversation in conversations]
    return tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]


def render_chat(conversation: list[Message]) -> str:
    """What the template writes for a conversation, without running jinja once per document; a test compares both."""
    return BOS + "".join(f"<|{message['role']}|>{message['content']}{END}" for message in conversation)
