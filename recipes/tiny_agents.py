"""The tiny models of the WebShop and tools recipes, with tokenizers for their texts. Weights are
random; the shop's model is then trained to copy.

    python recipes/tiny_agents.py webshop runs/tiny_shop ../shared/data/webshop_products.jsonl.gz
    python recipes/tiny_agents.py tools runs/tiny_tools

A token of the shop is a frequent piece of the pages of training episodes. A token of the tools is a
letter, or a phrase that every question has.

Nearly everything that a policy writes in the shop stands on the page: words to search for, names to
click on. From the few written tokens of an episode, a model needs thousands of steps to learn to
copy; from random token sequences that repeat once, it needs two minutes.
"""

import sys
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rollick.envs.webshop import WebShop
from rollick.testing.tiny import ALPHABET, SPECIAL, save_tiny, tiny_model, tiny_tokenizer

PHRASES = ("What is ", "<calculator>", "</calculator>", "The answer is ")
TOOLS_SIZES = {"hidden": 96, "layers": 3, "heads": 4, "kv_heads": 4, "max_length": 256}
SHOP_SIZES = {"hidden": 96, "layers": 3, "heads": 4, "kv_heads": 4, "max_length": 1024}
PIECES, TRIPS = 2048, 300
LESSONS, LESSON_TOKENS = 450, 6400


def save_tools_model(folder: Path, seed: int = 0) -> Path:
    return save_tiny(folder, alphabet=[*ALPHABET, *PHRASES], seed=seed, **TOOLS_SIZES)


def save_shop_model(folder: Path, products: str, seed: int = 0, *, lessons: int = LESSONS) -> Path:
    tokenizer = shop_tokenizer(products)
    model = tiny_model(len(tokenizer), seed=seed, **SHOP_SIZES)
    teach_copying(model, lessons, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach_copying(model: LlamaForCausalLM, lessons: int, seed: int) -> None:
    """Train on random sequences that repeat once: predict the second half."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 50, total_iters=49)
    for _ in track(range(lessons), "copying"):
        length = int(torch.randint(8, 49, (), generator=draw))
        shape = (LESSON_TOKENS // (2 * length), length)
        tokens = torch.randint(len(SPECIAL), model.config.vocab_size, shape, generator=draw)
        tokens = tokens.repeat(1, 2)
        # The logits at a position predict the next token.
        logits = model(tokens).logits[:, length:-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, length + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()


def shop_tokenizer(products: str) -> PreTrainedTokenizerFast:
    """A tokenizer of frequent pieces of training episodes; held-out episodes are not used."""
    pieces = Tokenizer(models.BPE())
    # A space is its own token, so a word has the same tokens everywhere.
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for seed in range(TRIPS) for text in trip(products, seed)]
    pieces.train_from_iterator(texts, trainer)
    pad, bos, eos, unknown = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown
    )
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


def trip(products: str, seed: int) -> list[str]:
    """All texts of an episode of the solver."""
    shop = WebShop(products=products, style="plain", rules=False, per_page=3, split="train")
    page, _ = shop.reset(seed)
    texts = [str(page)]
    while (action := shop.solve()) is not None:
        page, _, over, late, _ = shop.step(action)
        texts += [action, str(page)]
        if over or late:
            break
    return texts


if __name__ == "__main__":
    if sys.argv[1] == "webshop":
        save_shop_model(Path(sys.argv[2]), sys.argv[3])
    else:
        save_tools_model(Path(sys.argv[2]))
