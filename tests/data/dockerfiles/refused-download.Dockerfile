# refused: :3: `https://example.com/x.tar.gz` would be downloaded
FROM debian
ADD https://example.com/x.tar.gz /opt/
