"""Audio files: what is read, and what is refused and why."""

from __future__ import annotations

import time

import attrs
import numpy as np
import pytest

from helpers_audio import encode, silence, tone, video_without_sound, wav
from trioserve.audio.decoding import decode_audio
from trioserve.audio.limits import AudioLimits
from trioserve.audio.speech import Speech
from trioserve.errors import InvalidRequestError

LIMITS = AudioLimits()
HOUR = 3600


@pytest.mark.parametrize(
    ("container", "codec", "rate", "channels"),
    [
        ("wav", "pcm_u8", 8_000, 1),
        ("wav", "pcm_s16le", 44_100, 2),
        ("wav", "pcm_s24le", 22_050, 6),
        ("wav", "pcm_s32le", 11_025, 1),
        ("wav", "pcm_f32le", 16_000, 1),
        ("wav", "pcm_f64le", 48_000, 2),
        ("wav", "pcm_mulaw", 8_000, 1),
        ("aiff", "pcm_s16be", 44_100, 2),
        ("flac", "flac", 96_000, 2),
        ("mp3", "libmp3lame", 44_100, 2),
        ("ogg", "libopus", 48_000, 2),
        ("ipod", "aac", 44_100, 2),
        ("adts", "aac", 44_100, 1),
        ("webm", "libopus", 48_000, 1),
    ],
)
def test_what_is_heard_is_what_was_encoded(container: str, codec: str, rate: int, channels: int) -> None:
    """As a tone of the right pitch, length and loudness: the mean of the channels."""
    file = encode(tone(1.0, rate=rate, channels=channels), container, codec, rate=rate)
    speech = decode_audio(file, LIMITS)
    assert speech.samples.dtype == np.float32
    assert speech.duration == pytest.approx(1.0, abs=0.06)  # codecs work in whole frames
    steady = speech.samples[4000:12000]  # half a second
    spectrum = np.abs(np.fft.rfft(steady)) / 4000
    assert np.argmax(spectrum) / 0.5 == 440
    assert spectrum.max() == pytest.approx((0.3 + 0.1 * (channels - 1)) / channels, rel=0.05)


def test_16_bit_samples_at_16_khz_come_out_as_they_are() -> None:
    samples = np.random.default_rng(0).integers(-(2**15), 2**15, 20_000).astype("<i2")
    decoded = decode_audio(wav(samples.tobytes()), LIMITS)
    np.testing.assert_array_equal(decoded.samples, samples.astype(np.float32) / 2**15)
    np.testing.assert_array_equal(decoded.samples, Speech.from_pcm16(samples.tobytes()).samples)


@pytest.mark.parametrize("claims", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_file_may_not_know_its_length(claims: int) -> None:
    """As programs write it into a pipe."""
    assert decode_audio(wav(bytes(32_000), claims=claims), LIMITS).duration == 1.0


def _bomb() -> bytes:
    """Three hours of silence, of which the header tells."""
    return encode(silence(3 * HOUR, rate=1_000), "flac", "flac", rate=1_000)


def _secret_bomb() -> bytes:
    """The same, with a header that does not know."""
    bomb = bytearray(_bomb())
    bomb[21] &= 0xF0  # STREAMINFO: 36 bits of the number of samples
    bomb[22:26] = bytes(4)
    return bytes(bomb)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (lambda: b"", "an empty one"),
        (lambda: b"I am text, and no audio at all.\n" * 100, "must be WAV, .* got something that is not"),
        (lambda: wav(bytes(10), claims=3 * HOUR * 32_000), r"at most 7200 s .* 10800\.0 s by its header"),
        (lambda: wav(bytes(10), claims=32_000), r"cut off or damaged: of 1\.00 s by its header, 0\.00 s"),
        (lambda: wav(b""), "must be WAV|must have audio"),
        (_bomb, r"at most 7200 s long, got 10800\.0 s by its header"),
        (video_without_sound, "without sound"),
        (lambda: b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "must be WAV"),
        (lambda: b"ffconcat version 1.0\nfile '/etc/passwd'\n", "must be WAV"),
        (lambda: encode(tone(2), "flac", "flac")[:-8_000], r"cut off or damaged: of 2\.00 s"),
        (lambda: encode(tone(2), "ipod", "aac")[:9_000], "or is damaged"),
        (lambda: wav(bytes(100), bits=40), "must be WAV"),
    ],
)  # fmt: skip
def test_what_is_no_audio_is_refused_at_once(file: object, reason: str) -> None:
    data = file()  # type: ignore[operator]
    begun = time.monotonic()
    with pytest.raises(InvalidRequestError, match=f"^file .*{reason}") as caught:
        decode_audio(data, LIMITS)
    assert caught.value.parameter == "file"
    assert time.monotonic() - begun < 10  # it takes a tenth of a second, on a machine that does nothing else


def test_what_hides_its_length_is_decoded_up_to_the_limit_only() -> None:
    with pytest.raises(InvalidRequestError, match=r"at most 600 s long, got 60\d\.\d s or more"):
        decode_audio(_secret_bomb(), AudioLimits(max_duration=600))


def test_the_limits_are_kept() -> None:
    two_seconds = wav(bytes(64_000))
    for limits, reason in [
        (AudioLimits(max_bytes=64_043), "at most 64043 bytes, got 64044"),
        (AudioLimits(max_duration=1.5), r"at most 1.5 s long, got 2\.0 s"),
        (AudioLimits(max_decode_seconds=0), "decoded in 0 s"),
    ]:
        with pytest.raises(InvalidRequestError, match=reason):
            decode_audio(two_seconds, limits)
    assert decode_audio(two_seconds, AudioLimits(max_bytes=64_044, max_duration=2)).duration == 2


def test_decoding_can_be_ended() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_audio(wav(bytes(320_000)), LIMITS, check)


def test_samples_must_be_numbers() -> None:
    samples = tone(0.2, rate=16_000, channels=1)
    samples[0, 100] = np.nan
    with pytest.raises(InvalidRequestError, match="finite"):
        decode_audio(encode(samples, "wav", "pcm_f32le", rate=16_000), LIMITS)
    samples[0, 100] = 3.0
    assert decode_audio(encode(samples, "wav", "pcm_f32le", rate=16_000), LIMITS).samples.max() == 1


def test_ffmpeg_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    damaged = bytearray(encode(tone(2), "ipod", "aac"))
    damaged[5_000:20_000:50] = bytes(300)
    with pytest.raises(InvalidRequestError):
        decode_audio(bytes(damaged), attrs.evolve(LIMITS, max_duration=1.9))
    assert capfd.readouterr() == ("", "")
