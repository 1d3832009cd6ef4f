"""Pictures at generate, chat and serve: answers of the offline path, files, errors, conversations.

What is expected is computed from Pillow's pixels by transformers' processor, tokenizers and the
tower (vision_models.prompt), not by the code that the commands use.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import bitnet_ops
import vision_models
from bitnet_ops.cli import chat, main
from bitnet_ops.generate.images import Images
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.server import catalog
from pictures import file_of, photograph
from vision_models import PICTURE, question, rendered

CAT, DOG = file_of(photograph(300, 420)), file_of(photograph(96, 64, 3), "JPEG")
LENGTH = ["-n", "6"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model, two pictures, and texts that are none."""
    folder = tmp_path_factory.mktemp("pictures")
    vision_models.write_model(folder)
    (folder / "cat.png").write_bytes(CAT)
    (folder / "my dog.jpg").write_bytes(DOG)
    (folder / "half.png").write_bytes(CAT[: len(CAT) // 2])
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def lm(made: Path) -> LanguageModel:
    return bitnet_ops.load(made / "model")


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


Expected = Callable[..., str]


@pytest.fixture
def expected(lm: LanguageModel, made: Path) -> Expected:
    """What goes on behind a text in which <|image_pad|> stands for each of pictures."""

    def answer(text: str, *pictures: bytes, max_tokens: int = 1024, new: int = 6) -> str:
        prompt = vision_models.prompt(made / "model", text, pictures, max_tokens)
        return lm.generate(prompt, max_new_tokens=new)

    return answer


Out = pytest.CaptureFixture[str]


# generate -----------------------------------------------------------------------------------------


def test_pictures_stand_before_the_text(expected: Expected, capsys: Out) -> None:
    images = ["--image", "cat.png", "--image", "my dog.jpg"]
    assert main(["generate", "model", "A test", *images, *LENGTH]) == 0
    out, err = capsys.readouterr()
    assert out == f"A test{expected(f'{PICTURE}{PICTURE}A test', CAT, DOG)}\n"
    assert "picture cat.png: 420 x 300 pixels, 119 tokens\n" in err
    assert "picture my dog.jpg: 64 x 96 pixels, " in err
    assert re.search(r"^load .* s \| pictures [0-9.]+ s \| prompt ", err, re.M)


def test_pictures_through_the_template(expected: Expected, capsys: Out) -> None:
    options = ["--chat", "--no-enable-thinking", *LENGTH]
    assert main(["generate", "model", "What is it?", "--image", "cat.png", *options]) == 0
    text = rendered([question("What is it?")], enable_thinking=False)
    assert capsys.readouterr().out == f"{expected(text, CAT)}\n"


def test_fewer_tokens_and_the_report(expected: Expected, capsys: Out) -> None:
    images = ["--image", "cat.png", "--image-max-tokens", "64"]
    assert main(["generate", "model", "A test", *images, "--json", *LENGTH]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["text"] == expected(f"{PICTURE}A test", CAT, max_tokens=64)
    (image,) = report["images"]
    assert image == {"file": "cat.png", "width": 420, "height": 300, "tokens": 56}  # 6 x 9, and 2
    assert report["prompt_tokens"] == 56 + len("A test") and report["pictures_s"] > 0
    assert "picture" not in err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--image", "none.png"], 1, "none.png: expected a readable file, got No such file"),
        (["--image", "notes.txt"], 1, "notes.txt: expected a picture as PNG, JPEG, WEBP, GIF or"),
        (["--image", "half.png"], 1, "half.png: expected a whole picture, got one that cannot"),
        (["--image", "."], 1, ".: expected a readable file, got Is a directory"),
        (["--image", "cat.png", "--no-vision"], 2, "expected --image or --no-vision, got both"),
        (["--mmproj", "cat.png", "--no-vision"], 2, "expected --mmproj or --no-vision, got both"),
        (["--image", ""], 2, "--image: expected a text that is not empty"),
        (["--image-max-tokens", "16385"], 2, "expected an integer from 1 to 16384, got '16385'"),
        (["--mmproj", "cat.png"], 1, "expected a checkpoint or a GGUF file with --mmproj cat.png"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "-p", "hi"], ["chat"]])
def test_errors_are_one_line(
    command: list[str], options: list[str], status: int, words: str, capsys: Out
) -> None:
    assert main([*command, "-m", "model", *options]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("command", [["generate", "hi"], ["generate", "hi", "--chat"], ["chat"]])
def test_a_model_that_reads_texts_alone(command: list[str], capsys: Out) -> None:
    """The demo."""
    assert main([*command, "--image", "cat.png"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "image: expected texts alone, got a picture, and the model has no" in err


def test_an_animation_is_its_first_picture(made: Path, capsys: Out) -> None:
    frames = [photograph(32, 32, seed).quantize() for seed in range(2)]
    frames[0].save(made / "two.gif", save_all=True, append_images=frames[1:])
    assert main(["generate", "model", "hi", "--image", "two.gif", "-n", "1"]) == 0
    assert "note: two.gif: only the first picture of this GIF was read" in capsys.readouterr().err


# Files that are converted -------------------------------------------------------------------------


def test_the_tower_of_a_gguf_file(tmp_path: Path, expected: Expected, capsys: Out) -> None:
    """Found beside the file; with none there, named; a file that is converted with one stays."""
    text = expected(f"{PICTURE}A test", CAT)
    beside = vision_models.write_gguf(tmp_path / "beside")
    apart = vision_models.write_gguf(tmp_path / "apart", mmproj=False)
    command = ["A test", "--image", "cat.png", "--cache", str(tmp_path / "cache"), *LENGTH]
    assert main(["generate", str(beside), *command]) == 0
    assert capsys.readouterr().out == f"A test{text}\n"
    assert main(["generate", str(apart), *command]) == 1
    assert "the model has no tower" in capsys.readouterr().err
    tower = tmp_path / "beside" / "mmproj-F16.gguf"
    assert main(["generate", str(apart), "--mmproj", str(tower), *command]) == 0
    assert capsys.readouterr().out == f"A test{text}\n"
    assert len(list((tmp_path / "cache" / "converted").glob("[!.]*"))) == 3
    assert main(["generate", str(apart), "--mmproj", str(tmp_path / "none.gguf"), *command]) == 1
    assert "load: expected a file for --mmproj, got " in capsys.readouterr().err


# chat ---------------------------------------------------------------------------------------------


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Callable[..., tuple[str, str]]:
    """What chat says to lines, on stdout and stderr."""

    def run(*lines: str, options: tuple[str, ...] = (), status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        quick = ["--no-enable-thinking"] if "--plain" not in options else []
        assert main(["chat", "model", *LENGTH, *quick, *options]) == status
        out, err = capsys.readouterr()
        return out, err

    return run


Talk = Callable[..., tuple[str, str]]


def turns(*messages: dict[str, object]) -> str:
    return rendered(list(messages), enable_thinking=False)


def test_a_picture_goes_with_the_next_message_alone(talk: Talk, expected: Expected) -> None:
    out, err = talk("/image cat.png", "/image my dog.jpg", "Which?", "Why?", "/history")
    first = expected(turns(question("Which?", 2)), CAT, DOG)
    said = {"role": "assistant", "content": first}
    again = expected(
        turns(question("Which?", 2), said, {"role": "user", "content": "Why?"}), CAT, DOG
    )
    assert out == f"{first}\n{again}\n"
    assert "with the next message: cat.png: 420 x 300 pixels, 119 tokens\n" in err
    listed = "user: [picture: cat.png, 420 x 300]\n[picture: my dog.jpg, 64 x 96]\nWhich?\n"
    assert listed in err
    assert base64.b64encode(CAT).decode()[:20] not in err


def test_pictures_of_the_first_message_by_an_option(talk: Talk, expected: Expected) -> None:
    out, _ = talk("Which?", options=("--image", "cat.png"))
    assert out == f"{expected(turns(question('Which?')), CAT)}\n"


def test_regen_keeps_them_and_reset_forgets(talk: Talk, expected: Expected) -> None:
    out, _ = talk("/image cat.png", "Which?", "/regen", "/image my dog.jpg", "/reset", "Which?")
    seen = expected(turns(question("Which?")), CAT)
    blind = expected(turns({"role": "user", "content": "Which?"}))
    assert out == f"{seen}\n{seen}\n{blind}\n" and seen != blind


def test_image_alone_leaves_out_what_waits(talk: Talk, expected: Expected) -> None:
    out, err = talk("/image cat.png", "/image", "Which?")
    assert out == f"{expected(turns({'role': 'user', 'content': 'Which?'}))}\n"
    assert "left out: 1 picture\n" in err


def test_without_a_template(talk: Talk, expected: Expected) -> None:
    out, _ = talk("/image cat.png", "A test", "A test", options=("--plain",))
    seen, blind = expected(f"{PICTURE}A test", CAT), expected("A test")
    assert out == f"{seen}\n{blind}\n" and seen != blind


def test_a_wrong_picture_ends_no_conversation(talk: Talk, expected: Expected) -> None:
    out, err = talk("/image half.png", "/image none.png", "Which?", status=1)
    assert out == f"{expected(turns({'role': 'user', 'content': 'Which?'}))}\n"
    assert err.count("bitnet-ops: error: ") == 2
    assert "half.png: expected a whole picture" in err and "none.png: expected a readable" in err


def test_saved_pictures_come_back(talk: Talk, expected: Expected, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first, _ = talk("/image cat.png", "/image my dog.jpg", "Which?", f"/save {file}")
    messages = json.loads(file.read_text())["messages"]
    parts = [
        {
            "type": "image_url",
            "name": name,
            "image_url": {"url": f"data:image/{kind};base64,{data}"},
        }
        for name, kind, data in (
            ("cat.png", "png", base64.b64encode(CAT).decode()),
            ("my dog.jpg", "jpeg", base64.b64encode(DOG).decode()),
        )
    ]
    said = {"role": "assistant", "content": first.removesuffix("\n")}
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
    assert messages == [asked, said]
    out, err = talk(f"/load {file}", "/history", "Why?")
    whole = turns(question("Which?", 2), said, {"role": "user", "content": "Why?"})
    assert out == f"{expected(whole, CAT, DOG)}\n"
    assert "read 2 messages, 2 pictures\n" in err and "[picture: cat.png, 420 x 300]" in err
    _, err = talk(f"/load {file}", options=("--no-vision",), status=1)
    assert "expected texts alone, got a picture" in err


def _saved(content: object, role: str = "user") -> str:
    return json.dumps({"messages": [{"role": role, "content": content}]})


def _image(url: object) -> list[object]:
    return [{"type": "image_url", "image_url": {"url": url}}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_saved(_image("https://example.org/cat.png")), "which is not fetched"),
        (_saved(_image("file:///etc/passwd")), "which is not read"),
        (_saved(_image("data:image/png;base64,AAAA")), "messages[0].content[0]: expected a pict"),
        (_saved(_image("data:image/png;base64,A?")), "expected a picture in base64"),
        (_saved(_image(3)), "expected messages with a role and a text"),
        (_saved(_image(None), "assistant"), "expected messages with a role and a text"),
        (_saved([{"type": "text", "text": 3}]), "expected messages with a role and a text"),
        (_saved([]), "expected messages with a role and a text"),
        ('{"messages": 3}', "expected messages with a role and a text"),
    ],
)
def test_files_that_hold_no_pictures(text: str, words: str, talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text(text)
    out, err = talk(f"/load {tmp_path}/wrong.json", status=1)
    assert out == "" and words in err and err.count("bitnet-ops: error: ") == 1


def test_conversations_of_texts_are_saved_as_before(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(_saved("In the beginning"))
    _, err = talk(f"/load {file}", f"/save {tmp_path}/new.json")
    assert "read 1 message\n" in err
    saved = json.loads((tmp_path / "new.json").read_text())
    assert saved["messages"] == json.loads(file.read_text())["messages"]


def test_tab_completes_commands_and_files(made: Path, tmp_path: Path) -> None:
    def tab(line: str) -> list[str]:
        found = []
        while (text := chat.complete(line, len(found))) is not None:
            found.append(text)
        return found

    assert tab("/im") == ["/image"] and tab("hello") == tab("hello my") == tab("/system m") == []
    assert tab("/image my") == ["/image my dog.jpg"]
    assert tab("/image m") == ["/image model/", "/image my dog.jpg"]
    assert tab(f"/load {made}/cat") == [f"/load {made}/cat.png"]
    assert tab(f"/save {tmp_path}/none/x") == []


# serve --------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., catalog.Catalog]:
    """The catalogue of a server that is told to end at once."""
    from bitnet_ops.server import run

    found: list[catalog.Catalog] = []

    def start(*options: str, status: int = 0) -> catalog.Catalog:
        class Ends(run._Server):
            async def serve(self, sockets: object = None) -> None:
                for listener in sockets:  # type: ignore[attr-defined]
                    listener.close()

        def make_app(
            load: Callable[[], catalog.Catalog], *_: object, on_ready: object, **__: object
        ):  # type: ignore[no-untyped-def]
            found.append(load())

            class State:
                class state:
                    service = None

            one = type("S", (), {"catalog": found[-1], "refuse": staticmethod(lambda: None)})()
            on_ready(one)  # type: ignore[operator]
            State.state.service = one  # type: ignore[assignment]
            return State

        monkeypatch.setattr(run, "make_app", make_app)
        monkeypatch.setattr(run, "_Server", Ends)
        assert main(["serve", "--port", "0", *options]) == status
        return found[-1]

    return start


def test_what_a_server_is_told_of_pictures(
    served: Callable[..., catalog.Catalog], made: Path, capsys: Out
) -> None:
    hosts = ["--image-host", "images.example.org", "--image-host", ".example.net"]
    limits = ["--image-max-tokens", "2048", "--images-per-request", "3"]
    models = ["model", "--model", "texts=" + str(bitnet_ops.language_model.DEMO_DIR)]
    first, second = served(*models, *hosts, *limits, "--image-folder", ".")
    assert first.sources.allowed_hosts == ("images.example.org", ".example.net")
    assert first.sources.allowed_folder == Path(".") and second.sources is first.sources
    images = first.lm.images
    assert isinstance(images, Images) and second.lm.images is None
    shown = images.limits
    assert (shown.max_tokens, shown.max_images, shown.max_total_tokens) == (2048, 3, 3 * 2048)
    assert "models: model (reads pictures), texts |" in capsys.readouterr().err


def test_a_server_fetches_nothing_by_itself(
    served: Callable[..., catalog.Catalog], capsys: Out
) -> None:
    from bitnet_ops.vision.decode import ImageLimits
    from bitnet_ops.vision.sources import NOTHING

    (first,) = served("model")
    assert first.sources == NOTHING and first.lm.images is not None
    assert first.lm.images.limits == ImageLimits() and "vision" in first.capabilities
    (blind,) = served("model", "--no-vision")
    assert blind.lm.images is None and "vision" not in blind.capabilities
    lines = capsys.readouterr().err.splitlines()
    ready = [line for line in lines if line.startswith("ready")]
    assert "model (reads pictures)" in ready[0] and "pictures" not in ready[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--image-host", "https://"], "--image-host: expected a host such as"),
        (["--image-host", "a b"], "--image-host: expected a host such as"),
        (["--image-folder", "none"], "--image-folder: expected a folder to read from, got none"),
        (["--images-per-request", "0"], "expected an integer from 1 to 1024, got '0'"),
    ],
)
def test_a_server_that_is_told_wrong(options: list[str], words: str, capsys: Out) -> None:
    assert main(["serve", "model", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
