"""Audio: uploads to transcription requests, and text to sound. No speech is recognized or made."""

import io
import math
import uuid
import wave
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvflash.mocker.answer import Answer, event
from kvflash.mocker.fields import Body, one_of, refuse
from kvflash.mocker.plan import Choice, Step
from kvflash.mocker.protocol import GenerationParams
from kvflash.mocker.tokenizer import Tokenizer

# Telephone audio: 16,000 bytes a second; uploads are assumed to have this rate.
SAMPLE_RATE = 8_000
SAMPLE_BYTES = 2
SOUND_BYTES_PER_S = SAMPLE_RATE * SAMPLE_BYTES
# Three words a second, up to the limit of Whisper's decoder.
TOKENS_PER_S = 3
TOKENS_MAX = 400
SPEECH_CHARS_MAX = 4_096
CHAR_SAMPLES = SAMPLE_RATE // 16
SPEECH_FORMATS = {"wav": "audio/wav", "pcm": "audio/pcm"}
TEXT_FORMATS = ("json", "text", "verbose_json")


@dataclass(frozen=True, slots=True)
class Upload:
    """An audio upload, and the form of its transcription."""

    fields: dict[str, str]
    sound: bytes
    form: str  # One of TEXT_FORMATS.
    is_translated: bool  # To English.

    @property
    def seconds(self) -> int:
        return max(1, math.ceil(len(self.sound) / SOUND_BYTES_PER_S))

    def as_completion(self, digest: str) -> Body:
        """The equivalent completion request: a short prompt that depends on the audio."""
        task = "translate" if self.is_translated else "transcribe"
        told = self.fields
        prompt = f"<|{told.get('language', 'en')}|><|{task}|>{told.get('prompt', '')}{digest}"
        tokens = min(TOKENS_MAX, TOKENS_PER_S * self.seconds)
        return {
            "model": told.get("model"),
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": told.get("stream", "").lower() == "true",
        }


async def read_upload(request: web.Request, *, is_translated: bool) -> Upload:
    """Read an upload of sound; refuses other requests and wrong fields."""
    if request.content_type != "multipart/form-data":
        refuse(f"content-type must be multipart/form-data, got {request.content_type!r:.80}")
    try:
        parts = await request.post()
    # LookupError: a part has an unknown charset; RuntimeError: an unknown transfer encoding.
    except (ValueError, LookupError, RuntimeError, HttpProcessingError) as error:
        refuse(f"the upload is malformed: {' '.join(str(error).split())}")
    sound = parts.get("file")
    if not isinstance(sound, web.FileField):
        refuse("file must be an upload with a file name", "file")
    fields = {name: value for name, value in parts.items() if isinstance(value, str)}
    form = one_of(fields, "response_format", TEXT_FORMATS)
    return Upload(fields, sound.file.read(), form, is_translated)


class SoundAnswer(Answer):
    """A transcription or translation in vLLM's form."""

    def __init__(self, upload: Upload, params: GenerationParams, _: Tokenizer) -> None:
        kind = "translation" if upload.is_translated else "transcription"
        self._head = {
            "id": f"trsc-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk",
            "model": params.model,
        }
        self._upload = upload
        self._has_usage = upload.fields.get("stream_include_usage", "").lower() == "true"

    def whole(self, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        text, seconds = choice.plan.text, self._upload.seconds
        used = {"type": "duration", "seconds": seconds}
        if self._upload.form != "verbose_json":
            return {"text": text, "usage": used}
        segment: dict[str, Any] = {"id": 0, "seek": 0, "start": 0.0, "end": float(seconds)}
        segment |= {"text": text, "tokens": choice.plan.token_ids, "temperature": 0.0}
        segment |= {"avg_logprob": -0.5, "compression_ratio": 1.0, "no_speech_prob": 0.0}
        language = self._upload.fields.get("language", "en")
        told = {"language": language, "duration": float(seconds), "text": text}
        return {**told, "segments": [segment], "usage": used}

    def respond(self, whole: Body) -> web.Response:
        if self._upload.form == "text":
            return web.Response(text=whole["text"])
        return super().respond(whole)

    def piece(self, choice: Choice, step: Step) -> bytes:
        text = "".join(delta.text for delta in step.deltas)
        reason = choice.plan.finish_reason if step.is_last else None
        told = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        return event({**self._head, "choices": [told]})


def speak(body: Body) -> tuple[bytes, str]:
    """Convert text to audio, a tone for each character; returns bytes and content type."""
    text = body.get("input")
    if not isinstance(text, str) or not 1 <= len(text) <= SPEECH_CHARS_MAX:
        refuse(f"input must be a string of 1..={SPEECH_CHARS_MAX} characters", "input")
    form = one_of(body, "response_format", tuple(SPEECH_FORMATS))
    samples = array("h")
    for char in text:
        half = 10 + ord(char) % 40  # Samples of half a wave: 80 to 400 Hz.
        wave_of_it = array("h", [4_000] * half + [-4_000] * half)
        samples += (wave_of_it * (CHAR_SAMPLES // len(wave_of_it) + 1))[:CHAR_SAMPLES]
    if form == "pcm":
        return samples.tobytes(), SPEECH_FORMATS[form]
    told = io.BytesIO()
    with wave.open(told, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(SAMPLE_BYTES)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(samples.tobytes())
    return told.getvalue(), SPEECH_FORMATS[form]
