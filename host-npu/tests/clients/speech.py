"""OpenAI's whisper with random weights: trained, then used to transcribe: ``speech.py cpu|npu``."""

import sys

import torch
import whisper
from _model import STEPS, say
from torch.nn.functional import cross_entropy
from whisper.model import ModelDimensions, Whisper

device = sys.argv[1]
torch.manual_seed(0)
dimensions = ModelDimensions(
    n_mels=80, n_audio_ctx=1500, n_audio_state=32, n_audio_head=2, n_audio_layer=1,
    n_vocab=51865, n_text_ctx=64, n_text_state=32, n_text_head=2, n_text_layer=2,
)  # fmt: skip
model = Whisper(dimensions)
torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)
model = model.to(device)
# Two tones of two seconds, and their words.
seconds = torch.arange(2 * 16000) / 16000
sound = 0.3 * torch.sin(2 * torch.pi * 440 * seconds) + 0.1 * torch.sin(2 * torch.pi * 1000 * seconds)
mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(sound), device=device)
tokenizer = whisper.tokenizer.get_tokenizer(multilingual=True, language="en", task="transcribe")
words = tokenizer.encode(" two tones and then nothing") + [tokenizer.eot]
tokens = torch.tensor([[*tokenizer.sot_sequence, tokenizer.no_timestamps, *words]], device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(STEPS):
    loss = cross_entropy(model(mel[None], tokens[:, :-1])[0], tokens[0, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
greedy = model.decode(mel, whisper.DecodingOptions(fp16=False, language="en", sample_len=8))
whole = model.transcribe(sound, fp16=False, language="en", word_timestamps=True, temperature=0.0)
assert model.device.type == device, model.device
ends = [word["end"] for segment in whole["segments"] for word in segment["words"]]
say([*losses, greedy.avg_logprob, *greedy.tokens, *ends])
