"""Reports of experiments: charts, one HTML file, traces for Perfetto. Charts need matplotlib."""
