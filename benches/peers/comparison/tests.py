"""Tests of the script's processing of figures. Run `python3 -m unittest comparison.tests` in benches/peers."""

import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest
import xml.dom.minidom

from comparison import bars, chart, figures, programs, table


def found_from(*rows):
    """Returns the figures of a run from tuples (peer, case, at, values...)."""
    found = figures.Figures()
    for peer, case, at, *values in rows:
        found.add(json.dumps({"peer": peer, "case": case, "at": at, "values": values}))
    return found


# A job of one stream that takes symmalloc 10 ns, PyTorch 150 ns and the best RMM resource 60 ns.
JOB = (
    ("", "ops", "job", 100),
    ("", "streams", "job", 1),
    ("", "live_peak_bytes", "job", 1 << 30),
    (bars.OURS, "steady_ns_per_op", "job", 30, 10, 8),
    (bars.OURS, "cold_ns_per_op", "job", 400),
    (bars.OURS, "reserved_peak_bytes", "job", 1.1 * (1 << 30)),
    (bars.PYTORCH, "steady_ns_per_op", "job", 150),
    (bars.EXPANDABLE, "cold_ns_per_op", "job", 200),
    ("RMM pool", "steady_ns_per_op", "job", 90),
    ("RMM arena", "steady_ns_per_op", "job", 60),
)


class Figures(unittest.TestCase):
    def test_the_median_is_taken_over_all_rounds(self):
        found = found_from(("a", "pair_ns", "1", 5, 1), ("a", "pair_ns", "1", 3))
        self.assertEqual(found.median("a", "pair_ns", 1), 3)
        self.assertIsNone(found.median("b", "pair_ns", 1))

    def test_properties_of_a_job_belong_to_no_peer(self):
        self.assertEqual(found_from(JOB[0]).peers(), [])
        self.assertFalse(found_from(JOB[0]).has_any())

    def test_results_keep_the_spread(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results.json"
            found = found_from(*JOB)
            figures.write_results(path, {"date": "today"}, found, bars.judge(found), {"RMM async": "no reason"})
            results = json.loads(path.read_text(encoding="utf-8"))
        row = next(row for row in results["figures"] if row["peer"] == bars.OURS)
        self.assertEqual((row["median"], row["least"], row["greatest"], row["repeats"]), (10, 8, 30, 3))
        self.assertEqual(results["missing"], {"RMM async": "no reason"})
        self.assertEqual(results["machine"], {"date": "today"})


class Bars(unittest.TestCase):
    def verdicts(self, *rows):
        return {verdict.name: verdict for verdict in bars.judge(found_from(*rows))}

    def test_a_bar_compares_symmalloc_with_the_best_peer(self):
        verdicts = self.verdicts(*JOB)
        self.assertEqual(verdicts["steady state, times PyTorch's speed"].figure, 15)
        self.assertEqual(verdicts["steady state, times PyTorch's speed"].best, 150 / 8)
        self.assertTrue(verdicts["steady state, times PyTorch's speed"].is_met)
        self.assertEqual(verdicts["steady state, times the speed of RMM's best"].figure, 6)
        self.assertTrue(verdicts["steady state, times the speed of RMM's best"].is_met)
        self.assertEqual(verdicts["cold pass, times PyTorch expandable's speed"].figure, 0.5)

    def test_the_job_of_stitched_blocks_must_be_as_fast_through_c_as_on_pytorch(self):
        name = "steady state through C, times PyTorch's best speed"
        for job, is_met in ((bars.STITCHED_JOB, True), ("another", False)):
            rows = (("", "ops", job, 100), (bars.OURS_C, "steady_ns_per_op", job, 300), (bars.PYTORCH, "steady_ns_per_op", job, 330))
            self.assertEqual(self.verdicts(*rows)[name].is_met, is_met)

    def test_a_job_with_uses_has_separate_limits(self):
        rows = [tuple("job_uses" if word == "job" else word for word in row) for row in JOB]
        limits = {name: verdict.limit for name, verdict in self.verdicts(*rows).items()}
        self.assertEqual(limits["steady state, times PyTorch's speed"], bars.TIMES_PYTORCH_WITH_USES)
        self.assertEqual(limits["steady state, times the speed of RMM's best"], bars.TIMES_RMM_WITH_USES)

    def test_jobs_of_one_stream_compare_memory_in_the_default_configuration(self):
        verdict = self.verdicts(*JOB)["peak reserved over peak live, one stream"]
        self.assertAlmostEqual(verdict.figure, 1.1)
        self.assertFalse(verdict.is_met)

    def test_jobs_of_several_streams_compare_memory_with_shared_streams(self):
        reserved = (bars.OURS_SHARED, "reserved_peak_bytes", "job", 1 << 30)
        verdict = self.verdicts(*JOB, ("", "streams", "job", 9, 9, 9), reserved)["peak reserved over peak live, shared streams"]
        self.assertEqual((verdict.figure, verdict.is_met), (1, True))

    def test_threads_are_compared_with_linear_scaling_and_with_the_best_of_pytorch(self):
        rates = [(peer, "pairs_per_second", str(count), rate) for peer, count, rate in (
            (bars.OURS, 1, 10), (bars.OURS, 16, 80), (bars.PYTORCH, 16, 1), (bars.EXPANDABLE, 16, 2))]
        verdicts = self.verdicts(*rates, (bars.OURS, "pairs_per_second", "16", 60), (bars.OURS, "pairs_per_second", "16", 100))
        self.assertEqual(verdicts["threads, share of linear"].figure, 0.5)
        self.assertEqual(verdicts["threads, share of linear"].best, 0.625)
        self.assertEqual(verdicts["threads, times PyTorch's best total"].figure, 40)

    def test_a_bar_without_a_peer_is_not_judged(self):
        self.assertEqual(self.verdicts(*JOB[:4]), {})


class Table(unittest.TestCase):
    def test_the_table_has_a_row_per_figure_and_a_column_per_peer(self):
        found = found_from(*JOB, ("symmalloc scale", "growth_ns", "1000", 7), ("symmalloc scale, handles", "growth_ns", "9", 5))
        text = table.markdown({"GPU": "none", "driver": ""}, found, bars.judge(found))
        lines = text.splitlines()
        self.assertEqual(lines[0], "GPU: none")
        self.assertIn("|  | symmalloc | PyTorch | PyTorch expandable | RMM pool | RMM arena |", lines)
        self.assertIn("| job, steady, ns per op | 10.0 | 150.0 |  | 90.0 | 60.0 |", lines)
        self.assertIn("| job, peak reserved, MiB (over the peak live of 1,024) | 1,126 (1.100) |  |  |  |  |", lines)
        self.assertIn("| symmalloc scale: ns per allocation while growing |  | 7.0 |", lines)
        self.assertIn("| symmalloc scale, handles: ns per allocation while growing | 5.0 |  |", lines)
        self.assertNotIn("readings", text)
        self.assertIn("2 of 4 bars are met.", lines)
        self.assertIn("| steady state, times PyTorch's speed | job | 15.00 | 18.75 | at least 6 | met |", lines)
        self.assertIn("| cold pass, times PyTorch expandable's speed | job | 0.50 | 0.50 | at least 1 | **missed** |", lines)


    def test_readings_of_all_rounds_are_added(self):
        rows = [(bars.OURS, "readings", at, count) for at, count in (("all", 30), ("all", 20), ("disturbed", 7))]
        text = table.markdown({}, found_from(*JOB, *rows), [])
        self.assertIn("| readings, of which disturbed | 50, 7 |  |  |  |  |", text.splitlines())

    def test_the_table_shows_the_scaling_of_the_machine(self):
        rates = [(peer, case, count, rate) for peer, case, count, rate in (
            (bars.OURS, table.RATE, "1", 10), (bars.OURS, table.RATE, "2", 15), (bars.PYTORCH, table.RATE, "1", 1),
            ("chained arithmetic", table.ARITHMETIC, "1", 3), ("chained arithmetic", table.ARITHMETIC, "2", 6))]
        lines = table.markdown({}, found_from(*rates), []).splitlines()
        self.assertIn("| threads, share of linear | 1 | 2 |", lines)
        self.assertIn("| chained arithmetic | 1.00 | 1.00 |", lines)
        self.assertIn("| symmalloc | 1.00 | 0.75 |", lines)
        self.assertIn("|  | symmalloc | PyTorch |", lines, "arithmetic is not a peer")


class Chart(unittest.TestCase):
    def test_every_figure_has_a_mark_within_the_chart(self):
        rates = [(bars.OURS, "pairs_per_second", str(count), count * 1e7) for count in (1, 32)]
        picture = xml.dom.minidom.parseString(chart.svg(found_from(*JOB, *rates)))
        marks = [mark for mark in picture.getElementsByTagName("path") if mark.hasAttribute("transform")]
        words = {mark.firstChild.firstChild.data for mark in marks}
        self.assertLessEqual({"symmalloc, job: 10", "RMM arena, job: 60", "symmalloc, job: 1.1", "symmalloc, 32 threads: 320"}, words)
        size = picture.documentElement
        for mark in marks:
            x, y = map(float, mark.getAttribute("transform")[len("translate(") : -1].split())
            self.assertTrue(0 < x < float(size.getAttribute("width")) and 0 < y < float(size.getAttribute("height")))

    def test_a_run_without_figures_draws_an_empty_chart(self):
        xml.dom.minidom.parseString(chart.svg(figures.Figures()))


class Programs(unittest.TestCase):
    def test_peers_are_selected_by_parts_of_their_names(self):
        names = [peer.name for peer in programs.peers(False) if peer.is_wanted("pytorch, rmm p")]
        self.assertEqual(names, ["PyTorch", "PyTorch expandable", "RMM pool"])

    def test_every_bar_names_an_existing_peer(self):
        names = {peer.name for peer in programs.peers(False)}
        self.assertLessEqual(
            {bars.OURS, bars.OURS_SHARED, bars.OURS_C, *bars.SCALE, bars.PYTORCH, bars.EXPANDABLE, *bars.RMM}, names
        )

    def test_a_package_that_is_not_installed_is_reported_as_missing(self):
        with self.assertRaisesRegex(programs.Missing, "no_such_package_of_anybody"):
            programs.package_folder("no_such_package_of_anybody")

    def test_a_program_that_fails_or_hangs_reports_the_reason_and_its_figures(self):
        line = '{"peer":"p","case":"pair_ns","at":"1","values":[1]}'
        for script, reason in (
            (f"echo '{line}'; echo broken >&2; exit 3", "exit status 3: broken"),
            (f"echo '{line}'; exec sleep 9", "it took more than 1 s"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                bench = programs.Bench(pathlib.Path(folder))
                program = pathlib.Path(folder) / "program"
                program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
                program.chmod(0o755)
                bench.built["program"] = program
                turn = bench.measure(programs.Peer("p", "program"), programs.QUICK, 1)
            self.assertEqual(turn.lines, [line])
            self.assertIn(reason, turn.failure)


class Repeat(unittest.TestCase):
    def test_without_a_gpu_the_only_output_is_the_remedy(self):
        for smi, reason in (("", "command not found"), ("echo No devices were found; exit 6", "No devices were found")):
            with tempfile.TemporaryDirectory() as folder:
                (pathlib.Path(folder) / "dirname").symlink_to(shutil.which("dirname"))
                for tool, script in (("cargo", "exit"), ("c++", "exit"), ("git", "exit"), ("python3", "exit"), ("nvidia-smi", smi)):
                    if script:
                        program = pathlib.Path(folder) / tool
                        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
                        program.chmod(0o755)
                words = [shutil.which("bash"), programs.ROOT / "benches/repeat"]
                result = subprocess.run(words, capture_output=True, text=True, env={"PATH": folder}, check=False)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            remedy = f"no GPU is available (nvidia-smi: {reason}): install NVIDIA's driver, or pass --no-device"
            self.assertEqual(result.stderr, f"repeat: {remedy}\n")


if __name__ == "__main__":
    unittest.main()
