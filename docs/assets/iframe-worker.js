// Browsers run no worker from a file. Where the site is opened from a disk, search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.onmessage?.({ data }))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise(done => { script.onload = done })
      inside.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow?.onmessage({ data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
