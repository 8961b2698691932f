"""Figures: each line can be told from the others without colour, and has its name at its end."""

import json

import pytest

pytest.importorskip("matplotlib")


from sparsecoll.cli import plot, style
from sparsecoll.cli.main import main


def contrast(colour):
    """The contrast of a colour with white, as WCAG 2 has it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 1.05 / (0.05 + sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, by the names of their files."""
    found = {}
    monkeypatch.setattr(plot, "save", lambda figure, path: found.setdefault(path.name, figure))
    return found


def test_no_two_styles_share_a_colour_a_dash_or_a_marker():
    for values in zip(*style.STYLES, strict=True):
        assert len(set(values)) == len(style.STYLES)
    assert all(contrast(colour) >= 4.5 for colour, _, _ in style.STYLES)  # names of lines have their colours


def rows(count):
    """Rows of a dense algorithm and of `count` sparse ones on two and four ranks."""
    names = [("dense", 1.0), *((f"a{i}", 0.1) for i in range(count))]
    return [
        {"algo": name, "n": 9, "density": density, "P": P, "seconds": P * 1.5**i, "bytes_received": P}
        for i, (name, density) in enumerate(names)
        for P in (2, 4)
    ]


def test_every_line_has_its_name_beside_the_axes(tmp_path, drawn):
    plot.figures(rows(7), tmp_path, "r")
    assert sorted(drawn) == ["r_time_n9_d0.1.svg", "r_volume_n9_d0.1.svg"]
    for figure in drawn.values():
        (axes,), (legend,) = figure.axes, figure.legends
        figure.draw_without_rendering()
        assert [text.get_text() for text in legend.get_texts()] == ["dense", *(f"a{i}" for i in range(7))]
        assert [line.get_color() for line in legend.get_lines()] == [line.get_color() for line in axes.lines]
        box = legend.get_window_extent()
        assert box.x0 > axes.bbox.x1 and figure.bbox.x1 >= box.x1 and figure.bbox.y1 >= box.y1 and box.y0 >= 0


def test_more_lines_than_can_be_told_apart_are_refused(tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows(8)}))

    def drawn(*arguments):
        main(["plot", str(path), "--out", str(tmp_path), *arguments])
        return capsys.readouterr().out.split()

    for arguments, text in (
        ([], "--algo: expected at most 8 lines in a figure, got 9: choose among dense, a0, a1, "),
        (["--algo", "a1", "b"], "--algo: expected some of dense, a0, a1, a2, a3, a4, a5, a6, a7, got b"),
    ):
        with pytest.raises(SystemExit) as ended:
            drawn(*arguments)
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and printed.startswith(f"sparsecoll: {text}") and printed.count("\n") == 1
    assert drawn("--algo", "a1", "a7") == [str(tmp_path / f"rows_{what}_n9_d0.1.svg") for what in ("time", "volume")]
    svg = (tmp_path / "rows_time_n9_d0.1.svg").read_text()
    assert all(f"<!-- {name} -->" in svg for name in ("a1", "a7", "dense")) and "<!-- a2 -->" not in svg


def test_dense_sums_are_drawn_beside_the_chosen_lines_unless_some_of_them_are_chosen():
    some = [{"algo": name, "density": density} for name, density in (("x", 1.0), ("y", 1.0), ("a", 0.1), ("b", 0.1))]
    for names, expected in (([], "xyab"), (["a"], "xya"), (["a", "x"], "xa")):
        assert "".join(row["algo"] for row in plot.chosen(some, names)) == expected


def test_the_same_rows_give_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot.lines(rows(3), "P", "seconds", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_every_row_has_a_bar_of_its_own(tmp_path, drawn):
    densities = [0.0001, 0.0002, 0.0004, 0.0004]
    plot.stacked([{"algo": "a", "density": d, "select": 1.0} for d in densities], tmp_path / "bars.svg")
    axes = drawn["bars.svg"].axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"a, {100 * d:g} %" for d in densities]
    assert sorted({bar.get_y() for bar in axes.patches}) == sorted(bar.get_y() for bar in axes.patches)


def test_dense_is_a_line_in_the_figures_of_the_sparse_ones(tmp_path, drawn):
    rows = [
        {"algo": algo, "n": 9, "density": density, "P": P, "seconds": P * 0.01, "bytes_received": 10 * P}
        for algo, density in (("a", 0.1), ("b", 0.1), ("dense", 1.0))
        for P in (2, 4)
    ]
    made = plot.figures(rows, tmp_path, "r")
    assert sorted(path.name for path in made) == ["r_time_n9_d0.1.svg", "r_volume_n9_d0.1.svg"]
    axes = drawn["r_time_n9_d0.1.svg"].axes[0]
    assert [line.get_label() for line in axes.lines] == ["dense", "a", "b"]
    axes.figure.canvas.draw()
    assert all(float(tick.get_text().replace(",", "")) > 0 for tick in axes.get_yticklabels())  # 20, not 2 x 10^1


def test_a_sparse_line_may_go_up_to_a_density_of_1(tmp_path, drawn):
    rows = [
        {"algo": algo, "n": 9, "density": density, "P": P, "seconds": P * density, "bytes_received": 10 * P}
        for algo, density in (("dense", 1.0), ("a", 0.1), ("a", 0.5), ("a", 1.0))
        for P in (2, 4)
    ]
    plot.figures(rows, tmp_path, "r")
    for density, seconds in (("0.1", [200, 400]), ("0.5", [1000, 2000]), ("1", [2000, 4000])):
        dense, sparse = drawn[f"r_time_n9_d{density}.svg"].axes[0].lines
        assert (dense.get_label(), [*dense.get_ydata()]) == ("dense", [2000, 4000])
        assert (sparse.get_label(), [*sparse.get_ydata()]) == ("a", pytest.approx(seconds))
    dense, sparse = drawn["r_density_n9_P2.svg"].axes[0].lines
    assert [*sparse.get_xdata()] == [*dense.get_xdata()] == [0.1, 0.5, 1.0]
    assert {row["algo"] for row in plot.chosen(rows, ["a"])} == {"a", "dense"}


def test_the_legend_is_not_over_the_label_of_the_axis(tmp_path, drawn):
    for count in (1, 12):
        rows = [{"algo": f"a{i}", "density": 0.1, **dict.fromkeys(plot.PARTS, 1e-3)} for i in range(count)]
        plot.stacked(rows, tmp_path / f"{count}.svg", "title")
        figure = drawn[f"{count}.svg"]
        figure.canvas.draw()
        label = figure.axes[0].xaxis.label.get_window_extent()
        assert not figure.legends[0].get_window_extent().overlaps(label)
